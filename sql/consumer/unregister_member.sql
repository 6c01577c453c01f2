-- unregister_member(queue, consumer, member): removes a member from a consumer. A batch that the member holds goes to
-- the next member that asks. A consumer without members is an ordinary one again.
-- Result: true; false when there was none. Writes: deletes from member. Errors: 42704, 42501.
create or replace function gdq.unregister_member(queue text, consumer text, member text) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  delete from gdq.member m
   where m.subscription_id = (select gdq.own_subscription(queue, consumer)) and m.member_name = member;
  return found;
end
$$;
comment on function gdq.unregister_member(text, text, text) is
  'Removes a member from a consumer; false when there was none.';
