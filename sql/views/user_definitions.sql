-- user_definitions(): changes whenever a user defines a function, aggregate, operator, cast or label, or drops or
-- alters one. An operator or cast made anew calls another function. The functions of temporary schemas and those of
-- compile_view() are gdq's. Writes: nothing.
create or replace function gdq.user_definitions() returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  -- numbers from 16384 on are not PostgreSQL's own
  return (select md5(concat(
    (select string_agg(concat(p.oid, ' ', p.xmin), ',' order by p.oid)
       from pg_proc p join pg_namespace n on n.oid = p.pronamespace
      where p.oid >= 16384 and n.nspname !~ '^pg_temp_'
        and not (n.nspname = 'gdq_target' and p.proname ~ '^(refresh|load|look)_[0-9a-f]{12}$')), '/',
    (select string_agg(concat(o.oid, ' ', o.xmin), ',' order by o.oid) from pg_operator o where o.oid >= 16384), '/',
    (select string_agg(concat(c.oid, ' ', c.xmin), ',' order by c.oid) from pg_cast c where c.oid >= 16384), '/',
    (select string_agg(concat(e.oid, ' ', e.xmin), ',' order by e.oid) from pg_enum e))));
end
$$;
comment on function gdq.user_definitions() is
  'Changes whenever a user defines a function, aggregate, operator, cast or label, or drops or alters one.';
