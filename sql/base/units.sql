-- span_text(span): a time as people read it, in one or two units, as gdq/units.py has it: 12 s, 4 min 50 s, 2 h 30 min,
-- 3 d 4 h. Negative times count as 0. Writes: nothing.
create or replace function gdq.span_text(span interval) returns text
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  seconds constant bigint := greatest(floor(extract(epoch from span)), 0);
begin
  return case when seconds >= 86400 then concat_ws(' ', seconds / 86400, 'd',
                                                   nullif(seconds % 86400 / 3600, 0) || ' h')
              when seconds >= 3600 then concat_ws(' ', seconds / 3600, 'h', nullif(seconds % 3600 / 60, 0) || ' min')
              when seconds >= 60 then concat_ws(' ', seconds / 60, 'min', nullif(seconds % 60, 0) || ' s')
              when span is not null then seconds || ' s' end;
end
$$;
comment on function gdq.span_text(interval) is 'A time as people read it, in one or two units.';
