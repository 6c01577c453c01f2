-- look_body(view): the body of a function of PL/pgSQL that does what changed_logs() does for the subscription of a
-- view, but for lacks_changes(): it has a parameter since, and returns an oid[]. A session plans the look at each
-- segment once, and again when that was truncated. Good while view_stamp() is the same. Writes: nothing. Errors: 42704;
-- 42501.
create or replace function gdq.look_body(view text) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  v gdq.view := gdq.view_of_owner(view);
  looks text;
begin
  select string_agg(format($look$
  if pg_relation_size(%1$s::regclass) > 0 then
    if exists (select from %2$s where ev_txid >= later%3$s)
       or (running <> '{}' and exists (select from %2$s where ev_txid = any (running)%3$s)) then
      changed := changed || %1$s::oid;
    end if;
  end if;$look$, l.log::oid, gdq.table_name(l.log), l.condition), '' order by l.log)
    into looks
    from gdq.subscription s
    join gdq.consumer c using (consumer_id)
   cross join lateral gdq.view_logs(s.subscription_id) l
   where s.queue_id = v.queue_id and c.consumer_name = v.consumer_name;
  return format($body$
declare
  later bigint := pg_snapshot_xmax(since)::text::bigint;
  running bigint[] := string_to_array(split_part(since::text, ':', 3), ',')::bigint[];
  changed oid[] := '{}';
begin%s
  return changed;
end$body$, looks);
end
$$;
comment on function gdq.look_body(text) is 'The body of a function that finds the logs with changes of a view.';
