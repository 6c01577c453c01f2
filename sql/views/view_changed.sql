-- view_changed(view): whether a refresh would find changes: a row or event of the view's tables that became visible
-- after the position of its consumer, or a gap. It costs a look at the index of each log. Two things do not count:
-- changes made to the target itself, and capture being off, as changes are then not captured. Writes: nothing. Errors:
-- 42704.
create or replace function gdq.view_changed(view text) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  id integer;
begin
  select ss.subscription_id into id
    from gdq.view v
    join gdq.consumer c on c.consumer_name = v.consumer_name
    join gdq.subscription ss on ss.queue_id = v.queue_id and ss.consumer_id = c.consumer_id
   where v.view_name = view;
  if id is null then
    raise exception 'view "%" does not exist', view using errcode = 'undefined_object', hint = 'gdq views lists them.';
  end if;
  perform gdq.require_era((select v.queue_id from gdq.view v where v.view_name = view));
  return gdq.changed_since(id, (gdq.position_of(id)).snapshot);
exception when undefined_table then
  return true;  -- a log or a table is gone or being dropped: the refresh reports that
end
$$;
comment on function gdq.view_changed(text) is 'Whether a refresh of a view would find changes.';
