-- Captures every table from its creation on, as far as gdq takes it; what it refuses is noted.
create schema capture_all;
grant usage on schema capture_all to public;
create table capture_all.noted (at timestamptz default clock_timestamp(), relation text, refused text);
select gdq.create_queue('all_tables');

create function capture_all.capture() returns event_trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
  r record;
begin
  for r in select d.objid, d.object_identity from pg_event_trigger_ddl_commands() d
             join pg_class c on c.oid = d.objid
            where d.classid = 'pg_class'::regclass and c.relpersistence <> 't' and c.relkind in ('r', 'p')
              and d.schema_name not in ('gdq', 'gdq_log', 'capture_all') loop
    begin
      perform gdq.add_table('all_tables', r.objid, allow_rls => true);
      insert into capture_all.noted (relation) values (r.object_identity);
    exception when others then
      insert into capture_all.noted (relation, refused) values (r.object_identity, sqlstate || ' ' || sqlerrm);
    end;
  end loop;
end
$$;

create event trigger zz_capture_all on ddl_command_end
  when tag in ('CREATE TABLE', 'CREATE TABLE AS', 'SELECT INTO') execute function capture_all.capture();
