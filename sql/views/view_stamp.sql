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
    select md5(concat_ws('/', v.view_id, v.queue_id, v.consumer_name, v.definition, v.target, v.options,
             s.subscription_id, s.owner_role,
             -- subscribed_tables() in the same query
             array(
               select concat_ws(' ', t::text,
                        -- not the row itself, which TRUNCATE writes anew
                        (select concat_ws(' ', k.oid, k.relname, k.relnamespace::regnamespace, k.relowner, k.relkind,
                                  k.relpersistence, k.relispartition, k.reltype, k.relrowsecurity, k.relhasrules,
                                  k.relhastriggers, k.relchecks,
                                  k.relkind <> 'p' and exists (select from pg_inherits h where h.inhparent = k.oid))
                           from pg_class k where k.oid = t.relid),
                        array(select concat_ws(' ', a.attnum, a.xmin, format_type(a.atttypid, a.atttypmod))
                                from pg_attribute a where a.attrelid = t.relid and a.attnum > 0 order by a.attnum),
                        array(select concat_ws(' ', tv.version_id, tv.xmin, g.segment::oid)
                                from gdq.table_version tv left join gdq.log_segment g using (version_id)
                               where tv.table_id = t.table_id order by tv.version_id, g.slot, g.segment))
                 from gdq.captured_table t
                where t.queue_id = s.queue_id
                  and (s.all_tables
                       or exists (select from gdq.subscription_table st
                                   where st.subscription_id = s.subscription_id and st.table_id = t.table_id))
                order by t.table_id),
             case when v.options ? 'written' then gdq.ordinary_views_stamp() end))
      from gdq.view v
      left join gdq.consumer c on c.consumer_name = v.consumer_name
      left join gdq.subscription s on s.queue_id = v.queue_id and s.consumer_id = c.consumer_id
     where v.view_name = view);
end
$$;
comment on function gdq.view_stamp(text, bigint, uuid) is
  'Changes with everything that decides how a view is refreshed, beside what users define.';

-- ordinary_views_stamp(): changes with every definition of an ordinary view of this database. A function of its own, as
-- few views need it, and a statement that holds it would begin by opening all that it reads. Writes: nothing.
create or replace function gdq.ordinary_views_stamp() returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return (
    select string_agg(concat_ws(' ', c.oid, c.xmin, r.xmin, n.nspname,
             (select string_agg(a.xmin::text, ' ' order by a.attnum)
                from pg_attribute a where a.attrelid = c.oid)), ',' order by c.oid)
      from pg_class c
      join pg_namespace n on n.oid = c.relnamespace
      join pg_rewrite r on r.ev_class = c.oid
     where c.oid >= 16384 and c.relkind = 'v' and c.relpersistence <> 't');
end
$$;
comment on function gdq.ordinary_views_stamp() is 'Changes with every definition of an ordinary view.';
