-- check_key(table_id, described): error when the key of a captured table cannot identify its rows. described: from
-- describe_table(). Writes: nothing. Errors: 0A000 for mode pk without a key, or with one that is checked at the end of
-- the transaction; 22023 for a key without a unique index, nullable or not logged.
create or replace function gdq.check_key(table_id integer, described jsonb) returns void
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  t gdq.captured_table;
  bad text;
begin
  select * into strict t from gdq.captured_table ct where ct.table_id = check_key.table_id;
  if t.mode = 'pk' and not exists (select from jsonb_array_elements(described) c where (c->>'key')::boolean) then
    raise exception 'table % has no primary key, which mode pk logs', t.table_name
      using errcode = 'feature_not_supported',
      hint = 'Use mode full, or name the columns of a unique index with key.';
  elsif t.mode = 'pk' and t.key_attnums is null
        and exists (select from pg_index i where i.indrelid = t.relid and i.indisprimary and not i.indimmediate) then
    raise exception 'the primary key of % is DEFERRABLE: two rows may have one key for a while, and mode pk logs keys',
      t.table_name
      using errcode = 'feature_not_supported',
      hint = 'Use mode full, or name the columns of another unique index with key.';
  end if;
  select string_agg(quote_ident(a.attname), ', ' order by a.attnum) into bad
    from pg_attribute a where a.attrelid = t.relid and a.attnum = any (t.key_attnums) and not a.attnotnull;
  if bad is not null then
    raise exception 'key column % of % may be null', bad, t.table_name
      using errcode = 'invalid_parameter_value', hint = 'ALTER COLUMN ... SET NOT NULL first, or leave key out.';
  end if;
  select string_agg(quote_ident(a.attname), ', ' order by a.attnum) into bad
    from pg_attribute a
    join pg_constraint n on n.conrelid = a.attrelid and n.contype = 'n' and n.conkey = array[a.attnum]
   where a.attrelid = t.relid and a.attnum = any (t.key_attnums) and not n.convalidated;
  if bad is not null then
    raise exception 'key column % of % may be null: its NOT NULL is NOT VALID', bad, t.table_name
      using errcode = 'invalid_parameter_value', hint = 'ALTER TABLE ... VALIDATE CONSTRAINT first, or leave key out.';
  end if;
  if t.key_attnums is not null and not exists (
       select from pg_index i
        where i.indrelid = t.relid and i.indisunique and i.indisvalid and i.indimmediate and i.indpred is null
          and (select array_agg(k order by k)
                 from unnest(i.indkey::smallint[]) with ordinality u(k, n) where n <= i.indnkeyatts)
              = (select array_agg(k order by k) from unnest(t.key_attnums) k)) then
    raise exception 'no unique index of % has exactly the key columns', t.table_name
      using errcode = 'invalid_parameter_value',
      hint = 'Create one (not partial, not deferrable), or leave key out.';
  end if;
  select string_agg(quote_ident(a.attname), ', ') into bad
    from pg_attribute a
   where a.attrelid = t.relid
     and a.attnum = any (coalesce(t.key_attnums,
                                  (select i.indkey::smallint[] from pg_index i
                                    where i.indrelid = t.relid and i.indisprimary)))
     and not exists (select from jsonb_array_elements(described) c where (c->>'attnum')::int = a.attnum);
  if bad is not null then
    raise exception 'key column % of % must be logged', bad, t.table_name using errcode = 'invalid_parameter_value',
      hint = 'Leave key columns out of exclude, and name them in columns.';
  end if;
end
$$;
comment on function gdq.check_key(integer, jsonb) is 'Error when the key of a captured table cannot identify its rows.';
