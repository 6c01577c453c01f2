-- pin_settings(): gives the functions that others call the settings that their work depends on: a database or a role
-- may have others by ALTER DATABASE or ALTER ROLE. Functions that are called by these run under the same settings. An
-- install calls it. Runs with the caller's rights. Writes: pg_proc. Errors: 42501 unless the caller owns gdq.
--   jit: with low costs the plans of one maintain() would take seconds to compile;
--   the rest: how SQL text is read, and how values become text.
create or replace function gdq.pin_settings() returns void
language plpgsql volatile security invoker set search_path = pg_catalog, pg_temp
as $$
declare
  f regprocedure;
begin
  for f in select gdq.pinned() loop
    execute format($sql$
      alter function %s
        set jit = off
        set array_nulls = on
        set bytea_output = hex
        set datestyle = 'ISO, YMD'
        set extra_float_digits = 1
        set intervalstyle = postgres
        set quote_all_identifiers = off
        set standard_conforming_strings = on
        set transform_null_equals = off
      $sql$, f);
  end loop;
end
$$;
comment on function gdq.pin_settings() is
  'Gives the functions that others call the settings that their work depends on.';

-- pinned(): the functions that pin_settings() is for: those that a role may execute, and event triggers. Not those that
-- SQL calls once for each row, nor apply_ddl(), whose DDL is the caller's. Writes: nothing.
create or replace function gdq.pinned() returns setof regprocedure
language sql stable security definer set search_path = pg_catalog, pg_temp
as $$
  select p.oid
    from pg_proc p
   where p.pronamespace = 'gdq'::regnamespace and p.prokind = 'f'  -- a procedure with settings may not commit
     and p.proname <> all ('{apply_ddl,event_triggers_on,insert_event,insert_events,row_fits,row_is_whole,row_has_all,
                             segment_is,table_name}')
     and (p.prorettype = 'event_trigger'::regtype
          or exists (select from unnest('{gdq_reader,gdq_consumer,gdq_admin}'::name[]) role
                      where p.oid in (select gdq.granted(role))))
$$;
comment on function gdq.pinned() is 'The functions that pin_settings() is for.';
