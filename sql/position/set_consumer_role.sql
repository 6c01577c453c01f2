-- set_consumer_role(queue, consumer, role): gives a consumer to another role. For administrators.
-- Writes: subscription. Errors: 42704 for queue, consumer or role; 42501 when the role may not read its tables.
create or replace function gdq.set_consumer_role(queue text, consumer text, role name) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  id integer := gdq.find_subscription(queue, consumer);
begin
  if not gdq.is_administrator(gdq.invoker()) then
    raise exception 'only administrators give a consumer to another role' using errcode = 'insufficient_privilege',
      hint = 'GRANT gdq_admin TO them.';
  elsif not exists (select from pg_roles r where r.rolname = role) then
    raise exception 'role "%" does not exist', role using errcode = 'undefined_object';
  end if;
  update gdq.subscription s set owner_role = role where s.subscription_id = id;
  perform gdq.check_consumer_tables(id);
end
$$;
comment on function gdq.set_consumer_role(text, text, name) is 'Gives a consumer to another role.';
