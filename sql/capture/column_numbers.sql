-- column_numbers(tbl, names, what): the attribute numbers of named columns, in the order given; NULL for NULL. what:
-- the option that names them, for the messages. Writes: nothing. Errors: 42703 for a name that the table does not have;
-- 22023 for a column that triggers cannot see.
create or replace function gdq.column_numbers(tbl regclass, names text[], what text) returns smallint[]
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  bad record;
begin
  for bad in select n as name, a.attgenerated as generated
               from unnest(names) n
               left join pg_attribute a on a.attrelid = tbl and a.attname = n
                                       and a.attnum > 0 and not a.attisdropped loop
    if bad.generated is null then
      raise exception '%: table % has no column "%"', what, gdq.table_name(tbl), bad.name
        using errcode = 'undefined_column', hint = 'Write the name as it is stored, without quotes.';
    elsif bad.generated = 'v' then
      raise exception '%: column "%" of % is a virtual generated column, which triggers cannot see',
        what, bad.name, gdq.table_name(tbl)
        using errcode = 'invalid_parameter_value', hint = 'Name the columns that it is made of.';
    end if;
  end loop;
  return (select array_agg(a.attnum order by o)
            from unnest(names) with ordinality u(n, o) join pg_attribute a on a.attrelid = tbl and a.attname = n);
end
$$;
comment on function gdq.column_numbers(regclass, text[], text) is
  'Attribute numbers of named columns; error 42703 for an unknown one.';
