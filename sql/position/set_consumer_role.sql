-- set_consumer_role(queue, consumer, role): gives a consumer to another role. Only administrators may call it. Writes:
-- subscription. Errors: 42704 for queue, consumer or role; 42501 unless called by an administrator, when the role
-- may not read the consumer's tables, and for a view's consumer unless the caller may act as the role.
create or replace function gdq.set_consumer_role(queue text, consumer text, role name) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  id integer := gdq.find_subscription(queue, consumer);
begin
  if not gdq.is_administrator(gdq.invoker()) then
    raise exception 'only administrators give a consumer to another role' using errcode = 'insufficient_privilege',
      hint = 'Act as a member of gdq_admin.';
  elsif not exists (select from pg_roles r where r.rolname = role) then
    raise exception 'role "%" does not exist', role using errcode = 'undefined_object';
  elsif exists (select from gdq.view v join gdq.queue q using (queue_id)
                 where q.queue_name = set_consumer_role.queue and v.consumer_name = consumer)
        and not pg_has_role(gdq.invoker(), role, 'member') then
    -- the code of a view runs as its owner
    raise exception 'a view is given to roles only that one may act as, and % may not act as %', gdq.invoker(), role
      using errcode = 'insufficient_privilege', hint = format('GRANT %I TO %I', role, gdq.invoker());
  end if;
  update gdq.subscription s set owner_role = role where s.subscription_id = id;
  perform gdq.check_consumer_tables(id);
end
$$;
comment on function gdq.set_consumer_role(text, text, name) is 'Gives a consumer to another role.';
