-- Makes the event triggers that follow DDL, or warns that the installer may not make them.

do $triggers$
begin
  perform gdq.create_event_triggers();
exception when insufficient_privilege then
  raise warning 'the event triggers that follow DDL are missing: % may not make them', current_user
    using hint = 'Run DDL of captured tables with gdq apply-ddl, or have a superuser run gdq create-event-triggers.';
end
$triggers$
