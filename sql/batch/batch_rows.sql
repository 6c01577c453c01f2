-- batch_rows(batch_id, token, tbl, version, columns, as_text): the rows of batch_sql(), for a role that may use the
-- consumer but may not read the logs. The caller names the columns and their types, as table_columns().log_type has
-- them:
--   select * from gdq.batch_rows(7, '...', 'shop.t')
--     as r(ev_id bigint, ev_txid bigint, ev_time timestamptz, ev_op text, old_id integer, new_id integer)
--   columns: only these, in this order; NULL: all that batch_sql() has. as_text: those of columns that are given as
--   text, rendered as get_batch() renders them, whatever the settings of the session.
-- The server holds all rows, on disk when they are many, until the last one is read. Not sorted.
-- Writes: nothing. Errors: as batch_sql(); 42703 for an unknown column; 42804 for other types; 42501 for a batch of
-- another role's consumer.
create or replace function gdq.batch_rows(batch_id bigint, token uuid, tbl regclass, version bigint default null,
  columns text[] default null, as_text text[] default null) returns setof record
language plpgsql volatile rows 1000 security definer
  set search_path = pg_catalog, pg_temp set enable_seqscan = off set max_parallel_workers_per_gather = 0
  set datestyle = 'ISO, YMD' set intervalstyle = postgres set timezone = 'UTC' set extra_float_digits = 1
  set bytea_output = hex set lc_monetary = 'C' set quote_all_identifiers = off set xmlbinary = base64
as $$
declare
  changes text := gdq.batch_sql(batch_id, token, tbl, version);
  inets text[];
  chosen text := '*';
begin
  if columns is not null then
    -- the cast of inet to text adds a /32 that its output does not have
    inets := array(select image
                     from gdq.batch b
                     join gdq.subscription s using (subscription_id)
                     join gdq.captured_table ct using (queue_id)
                     join gdq.table_version v using (table_id),
                          jsonb_to_recordset(v.columns) c(log_type text, log_key text, log_old text, log_new text),
                          unnest(array[log_key, log_old, log_new]) image
                    where b.batch_id = batch_rows.batch_id
                      and ct.relid = tbl
                      and v.version_id = coalesce(version, gdq.current_version(ct.table_id))
                      and log_type = 'inet');
    select coalesce(string_agg(case when c <> all (coalesce(as_text, '{}')) then format('%I', c)
                                    when c = any (inets) then format('textin(inet_out(%I))', c)
                                    else format('%I::text', c) end, ', ' order by n), '')
      into chosen
      from unnest(columns) with ordinality u(c, n);
  end if;
  return query execute format('select %s from (%s) r', chosen, changes);
end
$$;
comment on function gdq.batch_rows(bigint, uuid, regclass, bigint, text[], text[]) is
  'Typed rows of one table in an open batch, for a role that may not read the logs.';
