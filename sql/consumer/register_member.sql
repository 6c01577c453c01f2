-- register_member(queue, consumer, member): adds a member to a consumer, which then hands its batches to members only.
-- Each member gets batches of its own and works on them beside the other members, so order is kept within a batch and
-- not across batches. Log rows are kept from the oldest unfinished batch on.
-- Result: true; false when the member was registered already. Writes: member. Errors: 42704; 22023 for a bad name;
-- 42501; 55006 for the consumer of a view.
create or replace function gdq.register_member(queue text, consumer text, member text) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  id integer := gdq.own_subscription(queue, consumer);
  used_by text;
begin
  if member is null or octet_length(member) not between 1 and 63 then
    raise exception 'a member name has 1 to 63 bytes' using errcode = 'invalid_parameter_value';
  end if;
  select v.view_name into used_by
    from gdq.view v where v.queue_id = gdq.find_queue(queue) and v.consumer_name = consumer;
  if used_by is not null then
    raise exception 'consumer "%" refreshes the view "%"', consumer, used_by
      using errcode = 'object_in_use', hint = 'Register another consumer.';
  end if;
  insert into gdq.member (subscription_id, member_name) values (id, member) on conflict do nothing;
  return found;
end
$$;
comment on function gdq.register_member(text, text, text) is
  'Adds a member to a consumer; false when it was registered already.';
