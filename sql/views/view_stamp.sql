-- view_stamp(view, batch_id, token): changes with everything that decides how a view is refreshed, beside what
-- user_definitions() tells: its own row and its role, what the catalogs and gdq hold of its tables and their logs, and
-- for a query over ordinary views all of these. Rows of catalogs are told apart by their writers, so the same
-- definition made anew changes it too. NULL when there is no such view. batch_id, token: those of begin_refresh().
-- Writes: nothing. Errors: GDQ01 when another refresh has taken over.
create or replace function gdq.view_stamp(view text, batch_id bigint default null, token uuid default null)
  returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  if batch_id is not null then
    perform gdq.open_batch(batch_id, token);
  end if;
  return (
    select md5(concat_ws('/', v.view_id, v.queue_id, v.group_id, v.consumer_name, v.definition, v.target, v.options,
             s.subscription_id, s.owner_role,
             (select string_agg(gdq.table_stamp(t), '/' order by t.table_id)
                from gdq.subscribed_tables(s.subscription_id) t),
             case when v.options ? 'written' then (
               select string_agg(concat_ws(' ', c.oid, c.xmin, r.xmin, n.nspname,
                        (select string_agg(a.xmin::text, ' ' order by a.attnum)
                           from pg_attribute a where a.attrelid = c.oid)), ',' order by c.oid)
                 from pg_class c
                 join pg_namespace n on n.oid = c.relnamespace
                 join pg_rewrite r on r.ev_class = c.oid
                where c.oid >= 16384 and c.relkind = 'v' and c.relpersistence <> 't') end))
      from gdq.view v
      left join gdq.consumer c on c.consumer_name = v.consumer_name
      left join gdq.subscription s on s.queue_id = v.queue_id and s.consumer_id = c.consumer_id
     where v.view_name = view);
end
$$;
comment on function gdq.view_stamp(text, bigint, uuid) is
  'Changes with everything that decides how a view is refreshed, beside what users define.';

-- table_stamp(t): what the catalogs and gdq hold of a captured table, as far as it decides how a view of it is
-- refreshed. Writes: nothing.
create or replace function gdq.table_stamp(t gdq.captured_table) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return concat_ws(' ', t::text,
    -- not the row itself, which TRUNCATE writes anew
    (select concat_ws(' ', c.oid, c.relname, n.nspname, c.relowner, c.relkind, c.relpersistence, c.relispartition,
              c.reltype, c.relrowsecurity, c.relhasrules, c.relhastriggers, c.relchecks,
              c.relkind <> 'p' and exists (select from pg_inherits h where h.inhparent = c.oid))
       from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.oid = t.relid),
    (select string_agg(concat_ws(' ', a.attnum, a.xmin, format_type(a.atttypid, a.atttypmod)), ',' order by a.attnum)
       from pg_attribute a where a.attrelid = t.relid and a.attnum > 0),
    (select string_agg(concat_ws(' ', v.version_id, v.xmin), ',' order by v.version_id)
       from gdq.table_version v where v.table_id = t.table_id),
    (select string_agg(s.segment::oid::text, ',' order by s.version_id, s.slot)
       from gdq.table_version v join gdq.log_segment s using (version_id) where v.table_id = t.table_id));
end
$$;
comment on function gdq.table_stamp(gdq.captured_table) is
  'What decides how a view of a captured table is refreshed, of the catalogs and of gdq.';
