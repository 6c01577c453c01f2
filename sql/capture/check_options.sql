-- check_options(tbl, ...): error when options of add_table() do not go together or do not fit a table. Writes: nothing.
-- Errors: 22023; 0A000 for granularity statement where statement triggers miss changes; 42501 for always on a table of
-- another owner.
create or replace function gdq.check_options(tbl regclass, mode text, include text[], columns text[], exclude text[],
  operations text[], granularity text, always boolean, "where" text, format text, unchanged text) returns void
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  known constant text[] := '{insert,update,delete,truncate}';
  other regclass;
begin
  if mode is null or mode not in ('full', 'pk') then
    raise exception 'unknown mode "%"', mode using errcode = 'invalid_parameter_value', hint = 'mode is full or pk.';
  elsif mode = 'full' and include is not null then
    raise exception 'include goes with mode pk: mode full logs every column'
      using errcode = 'invalid_parameter_value', hint = 'Leave include out, or say mode pk.';
  elsif mode = 'pk' and (columns is not null or exclude is not null) then
    raise exception 'columns and exclude go with mode full' using errcode = 'invalid_parameter_value',
      hint = 'Name the columns to log beside the key with include.';
  elsif columns is not null and exclude is not null then
    raise exception 'give columns or exclude, not both'
      using errcode = 'invalid_parameter_value', hint = 'columns names those to log, exclude those not to.';
  elsif format not in ('typed', 'json') then
    raise exception 'unknown format "%"', format
      using errcode = 'invalid_parameter_value', hint = 'format is typed or json.';
  elsif format = 'json' and (columns is not null or exclude is not null or "where" is not null) then
    raise exception 'columns, exclude and where go with format typed: format json logs whole rows'
      using errcode = 'invalid_parameter_value',
            hint = case when gdq.event_triggers_on() then ''
                        else 'format is json where the event triggers of gdq are missing or off. ' end
                   || 'Leave them out, or capture in mode pk to hand on the key alone.';
  elsif columns = '{}' then
    raise exception 'columns: name at least one column'
      using errcode = 'invalid_parameter_value', hint = 'Leave columns out to log them all.';
  elsif operations is null or not operations <@ known or not operations && array_remove(known, 'truncate') then
    raise exception 'operations: % is no list of operations to capture', coalesce(operations::text, 'null')
      using errcode = 'invalid_parameter_value',
            hint = 'Give some of insert, update and delete; truncate only with one of these.';
  elsif granularity is null or granularity not in ('row', 'statement') then
    raise exception 'unknown granularity "%"', granularity
      using errcode = 'invalid_parameter_value', hint = 'granularity is row or statement.';
  elsif granularity = 'statement' and always then
    raise exception 'always goes with granularity row: a logical replication worker fires no statement triggers'
      using errcode = 'invalid_parameter_value', hint = 'Leave always out, or say granularity row.';
  elsif unchanged is null or unchanged not in ('both', 'once', 'omit') then
    raise exception 'unknown value of unchanged: "%"', unchanged
      using errcode = 'invalid_parameter_value', hint = 'unchanged is both, once or omit.';
  elsif granularity = 'statement' and unchanged <> 'both' then
    raise exception 'unchanged "%" goes with granularity row: by statement images are not paired', unchanged
      using errcode = 'invalid_parameter_value', hint = 'Leave unchanged out, or say granularity row.';
  elsif mode = 'pk' and unchanged = 'omit' then
    raise exception 'unchanged "omit" goes with mode full: mode pk logs what include names'
      using errcode = 'invalid_parameter_value', hint = 'Say unchanged once, or leave large columns out of include.';
  elsif granularity = 'statement' and gdq.statement_fault(tbl) is not null then
    raise exception '%', gdq.statement_fault(tbl)
      using errcode = 'feature_not_supported',
            hint = 'Capture it with granularity row, or the root of its partitions.';
  end if;
  if always then
    select c.oid into other
      from (select tbl::oid as relid union select p.relid from pg_partition_tree(tbl) p) r
      join pg_class c on c.oid = r.relid
     where not pg_has_role(current_user, c.relowner, 'usage') limit 1;
    if other is not null then
      raise exception 'only the owner of % can have triggers fire always', gdq.table_name(other)
        using errcode = 'insufficient_privilege',
              hint = format('GRANT %I TO %I;',
                            (select pg_get_userbyid(c.relowner) from pg_class c where c.oid = other), current_user);
    end if;
  end if;
end
$$;
comment on function gdq.check_options(regclass, text, text[], text[], text[], text[], text, boolean, text, text,
                                      text) is
  'Error when options of capture do not go together or do not fit a table.';
