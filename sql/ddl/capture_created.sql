-- capture_created(): captures the tables that the current command has made and that match a rule of a queue, in the
-- command's own transaction, so that no row is written before. CREATE TABLE AS and SELECT INTO have filled their table
-- by then, which is a resync. Where it fails, maintain() captures the table later; so it does after REPEATABLE READ and
-- SERIALIZABLE transactions, whose snapshot may be older than the rules.
-- Writes: as capture_wanted(). Errors: none but a cancel or a statement_timeout.
create or replace function gdq.capture_created() returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
  set default_table_access_method = 'heap' set default_tablespace = '' set lock_timeout = '500ms'
  set client_min_messages = error
as $$
declare
  created oid[];
begin
  if not gdq.snapshot_is_fresh() or not exists (select from gdq.new_table_rule) then
    return;
  end if;
  perform gdq.shorten_lock_timeout();
  created := array(select c.objid from pg_event_trigger_ddl_commands() c
                    where c.object_type = 'table'
                      and c.command_tag in ('CREATE TABLE', 'CREATE TABLE AS', 'SELECT INTO')
                      and c.schema_name not in ('pg_temp', 'gdq_log'));
  if created <> '{}' then
    perform gdq.capture_wanted(w.rule_id, w.relid, 1) from gdq.wanted_tables(created) w;
  end if;
exception when others then
  raise log 'gdq: new tables could not be captured: %', sqlerrm;
end
$$;
comment on function gdq.capture_created() is
  'Captures the tables that the current command has made and that match a rule of a queue.';
