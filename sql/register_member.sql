-- register_member(queue, consumer, member): makes a consumer cooperative, or adds a member to it. Members share the
-- consumer's stream: each is handed batches of its own and works on them beside the others, so order is kept within a
-- batch and not across batches. Rows are held from the oldest unfinished batch on.
-- Result: true; false when it was registered already. Writes: member. Errors: 42704, 22023; 55006 for the consumer of a view.
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
  select v.view_name into used_by from gdq.view v where v.queue_id = gdq.find_queue(queue) and v.consumer_name = consumer;
  if used_by is not null then
    raise exception 'consumer "%" refreshes the view "%"', consumer, used_by
      using errcode = 'object_in_use', hint = 'Register another consumer.';
  end if;
  insert into gdq.member (subscription_id, member_name) values (id, member) on conflict do nothing;
  return found;
end
$$;
comment on function gdq.register_member(text, text, text) is 'Adds a member to a consumer; false when it was there.';

-- unregister_member(queue, consumer, member): forgets a member. A batch that it holds goes to the next who asks. Without
-- members left the consumer is an ordinary one again. Result: true; false when there was none.
-- Writes: deletes from member. Errors: 42704.
create or replace function gdq.unregister_member(queue text, consumer text, member text) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  delete from gdq.member m where m.subscription_id = (select gdq.own_subscription(queue, consumer)) and m.member_name = member;
  return found;
end
$$;
comment on function gdq.unregister_member(text, text, text) is 'Forgets a member of a consumer; false when there was none.';

-- require_member(subscription_id, member): error unless a worker gives its name where the consumer has members, and one
-- of theirs. Writes: nothing. Errors: 42704, 55000.
create or replace function gdq.require_member(subscription_id integer, member text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if member is null and exists (select from gdq.member m where m.subscription_id = require_member.subscription_id) then
    raise exception 'the consumer has members, and none is named' using errcode = 'object_not_in_prerequisite_state',
      hint = 'Name the member that asks; gdq.member_info() lists them.';
  elsif member is not null and not exists (select from gdq.member m where m.subscription_id = require_member.subscription_id
                                                                      and m.member_name = require_member.member) then
    raise exception 'the consumer has no member "%"', member using errcode = 'undefined_object',
      hint = 'Register it with gdq.register_member().';
  end if;
end
$$;
comment on function gdq.require_member(integer, text) is 'Error unless a worker names one of the consumer''s members, or it has none.';

-- touch_batch(batch_id, token): tells that the member which holds a batch is alive: its dead_after begins anew. Call it
-- beside long work, in a transaction of its own. Writes: batch_token. Errors: GDQ01 when the batch was taken over.
create or replace function gdq.touch_batch(batch_id bigint, token uuid) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  b gdq.batch;
begin
  perform gdq.require_read_committed('touch_batch');
  b := gdq.open_batch(batch_id, token);
  perform from gdq.subscription s where s.subscription_id = b.subscription_id for no key update;
  perform gdq.require_held(b, token);  -- somebody may have taken it over meanwhile
  insert into gdq.batch_token (batch_id, token, member)
    select b.batch_id, bt.token, bt.member from gdq.batch_token bt where bt.batch_id = b.batch_id order by bt.grant_id desc limit 1;
end
$$;
comment on function gdq.touch_batch(bigint, uuid) is 'Tells that the holder of a batch is alive.';

-- member_info(queue, consumer): one row a member (NULL: of all queues and consumers), with the open batch that it holds and
-- since when, and when it was last handed one. Writes: nothing. Errors: 42704.
create or replace function gdq.member_info(queue text default null, consumer text default null)
  returns table (queue_name text, consumer_name text, member_name text, batch_id bigint, held_for interval)
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select q.queue_name, c.consumer_name, m.member_name, held.batch_id, clock_timestamp() - held.granted_at
    from gdq.member m join gdq.subscription s using (subscription_id) join gdq.queue q using (queue_id) join gdq.consumer c using (consumer_id)
    left join lateral (select b.batch_id, holder.granted_at
                         from gdq.position_of(s.subscription_id) pos
                         join gdq.batch b on b.subscription_id = s.subscription_id and b.batch_no > pos.batch_no
                        cross join lateral (select bt.member, bt.granted_at from gdq.batch_token bt
                                             where bt.batch_id = b.batch_id order by bt.grant_id desc limit 1) holder
                        where holder.member = m.member_name
                          and not exists (select from gdq.batch_end e where e.batch_id = b.batch_id)
                        order by b.batch_no limit 1) held on true
   where (queue is null or q.queue_id = gdq.find_queue(queue))
     and (consumer is null or s.subscription_id = gdq.find_subscription(queue, consumer))
   order by 1, 2, 3
$$;
comment on function gdq.member_info(text, text) is 'Members of consumers with the batches that they hold.';
