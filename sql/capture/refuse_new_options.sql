-- refuse_new_options(t, wanted): error when a captured table cannot have these options. Writes: nothing.
-- Errors: as check_options(); 0A000, 55000, 55006.
create or replace function gdq.refuse_new_options(t gdq.captured_table, wanted gdq.captured_table) returns void
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  name text := gdq.table_name(t.relid);
  used_by text;
begin
  if gdq.capture_state(t.queue_id, t.relid) <> 'armed' then
    raise exception 'capture of table % is off', coalesce(name, t.table_name)
      using errcode = 'object_not_in_prerequisite_state',
            hint = 'gdq.table_info() says why. gdq.maintain() or a ticker switches it on once that is mended.';
  elsif t.origin and not wanted.origin then
    raise exception 'origin cannot be switched off: rows that are unread have one'
      using errcode = 'feature_not_supported', hint = 'Remove the table and add it again.';
  elsif t.allow_rls and not wanted.allow_rls and (select c.relrowsecurity from pg_class c where c.oid = t.relid) then
    raise exception '% has row level security, which consumers of the queue would pass by', name
      using errcode = 'feature_not_supported', hint = 'Remove the table from the queue.';
  elsif wanted.format = 'typed' and t.format = 'json' and not gdq.event_triggers_on() then
    raise exception 'format typed needs the event triggers of gdq, which are missing or off'
      using errcode = 'object_not_in_prerequisite_state', hint = 'As a superuser: gdq create-event-triggers.';
  end if;
  perform gdq.check_options(t.relid, wanted.mode, wanted.include_attnums::text[], wanted.column_attnums::text[],
                            wanted.exclude_attnums::text[], wanted.operations, wanted.granularity, wanted.always,
                            wanted.row_filter->>'text', wanted.format, wanted.unchanged);
  -- a view is planned with these options; the other ones do not matter to it
  if (wanted.mode, wanted.key_attnums, wanted.include_attnums, wanted.column_attnums, wanted.exclude_attnums,
      wanted.operations, wanted.granularity, wanted.row_filter, wanted.unchanged = 'omit')
     is distinct from (t.mode, t.key_attnums, t.include_attnums, t.column_attnums, t.exclude_attnums,
                       t.operations, t.granularity, t.row_filter, t.unchanged = 'omit') then
    select v.view_name into used_by
      from gdq.view v
      join gdq.consumer c using (consumer_name)
      join gdq.subscription s on s.consumer_id = c.consumer_id and s.queue_id = v.queue_id
     where v.queue_id = t.queue_id
       and exists (select from gdq.subscribed_tables(s.subscription_id) st where st.table_id = t.table_id) limit 1;
    if used_by is not null then
      raise exception 'table % is read by the view "%", which was planned with its options', name, used_by
        using errcode = 'object_in_use', hint = 'Drop the view, and make it again afterwards.';
    end if;
  end if;
end
$$;
comment on function gdq.refuse_new_options(gdq.captured_table, gdq.captured_table) is
  'Error when a captured table cannot have these options.';
