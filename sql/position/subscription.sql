-- Subscriptions: each is a consumer on one queue. Which roles may use it, and which tables and messages it takes.

-- find_subscription(queue, consumer): the id of a subscription. Writes: nothing. Errors: 42704.
create or replace function gdq.find_subscription(queue text, consumer text) returns integer
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  id integer;
  queue_of integer := gdq.find_queue(queue);
begin
  select s.subscription_id into id
    from gdq.subscription s join gdq.consumer c using (consumer_id)
   where s.queue_id = queue_of and c.consumer_name = consumer;
  if id is null then
    raise exception 'consumer "%" is not registered on queue "%"', consumer, queue
      using errcode = 'undefined_object', hint = 'Register it with gdq.register_consumer().';
  end if;
  return id;
end
$$;
comment on function gdq.find_subscription(text, text) is
  'Id of a subscription; error 42704 when the consumer is not registered on the queue.';

-- usable_subscription(queue, consumer): the id of a subscription that the session's role may use. Writes: nothing.
-- Errors: 42704, 42501, GDQ07.
create or replace function gdq.usable_subscription(queue text, consumer text) returns integer
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  who constant name := gdq.invoker();
  id integer;
begin
  -- the usual case in one query: every batch comes here
  select s.subscription_id into id
    from gdq.queue q
    join gdq.subscription s using (queue_id)
    join gdq.consumer c using (consumer_id)
   where q.queue_name = queue and c.consumer_name = consumer and s.owner_role = who
     and (select e.written_by = e.xmin and e.written_in = 'gdq.era'::regclass from gdq.era e
               where e.queue_id = s.queue_id order by e.era_no desc limit 1);
  if id is null then
    id := gdq.find_subscription(queue, consumer);
    perform gdq.check_consumer_role(id);
  end if;
  return id;
end
$$;
comment on function gdq.usable_subscription(text, text) is
  'Id of a subscription that the session may use; error 42501 for another.';

-- own_subscription(queue, consumer): the id of a subscription that the session's role may use, and whose owner may read
-- its tables. Writes: nothing. Errors: 42704, 42501, GDQ07.
create or replace function gdq.own_subscription(queue text, consumer text) returns integer
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  id integer := gdq.usable_subscription(queue, consumer);
begin
  perform gdq.check_consumer_tables(id);
  return id;
end
$$;
comment on function gdq.own_subscription(text, text) is
  'Id of a subscription that the session may use and whose owner may read its tables; else error 42501.';

-- lock_subscription(queue, consumer): locks a subscription until the transaction ends, so that one worker at a time
-- moves it. Result: its id. Writes: a row lock. Errors: 42704, GDQ04; 42501 for the consumer of another role, or one
-- whose role may not read its tables.
create or replace function gdq.lock_subscription(queue text, consumer text) returns integer
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  id integer := gdq.own_subscription(queue, consumer);
begin
  perform gdq.require_read_committed('a consumer');
  perform from gdq.subscription s where s.subscription_id = id for no key update;
  return id;
end
$$;
comment on function gdq.lock_subscription(text, text) is 'Locks a subscription until the transaction ends.';

-- may_use_consumer(role, subscription_id): whether a role owns the subscription, is a member of the owning role, or is
-- an administrator. Writes: nothing.
create or replace function gdq.may_use_consumer(role name, subscription_id integer) returns boolean
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  return (
    select s.owner_role = role or gdq.is_administrator(role)
        or exists (select from pg_roles r where r.rolname = s.owner_role and pg_has_role(role, r.oid, 'usage'))
      from gdq.subscription s where s.subscription_id = may_use_consumer.subscription_id);
end
$$;
comment on function gdq.may_use_consumer(name, integer) is 'Whether a role may use a subscription.';

-- check_consumer_role(subscription_id): error unless the session's role may use the subscription. Writes: nothing.
-- Errors: 42501.
create or replace function gdq.check_consumer_role(subscription_id integer) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  who name := gdq.invoker();
  s record;
begin
  if not gdq.may_use_consumer(who, subscription_id) then
    select ss.owner_role, c.consumer_name, q.queue_name into s
      from gdq.subscription ss join gdq.consumer c using (consumer_id) join gdq.queue q using (queue_id)
     where ss.subscription_id = check_consumer_role.subscription_id;
    raise exception 'consumer "%" of queue "%" belongs to role %', s.consumer_name, s.queue_name, s.owner_role
      using errcode = 'insufficient_privilege',
            hint = format('This session acts as %I. Have an administrator call gdq.set_consumer_role(), '
                          'or act as a member of %I.', who, s.owner_role);
  end if;
end
$$;
comment on function gdq.check_consumer_role(integer) is 'Error 42501 unless the session may use a subscription.';

-- check_consumer_tables(subscription_id): error when the role that owns a subscription may not read its tables. Reading
-- needs SELECT on the table or on all its logged columns, USAGE on its schema, and no row level security that hides
-- rows from the role. Checked for every batch: rights may be revoked, and tables added to a queue, while a consumer
-- runs. Administrators may read every captured table; a dropped table is not checked. Writes: nothing. Errors: 42501.
create or replace function gdq.check_consumer_tables(subscription_id integer) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  reader name := (select s.owner_role from gdq.subscription s
                   where s.subscription_id = check_consumer_tables.subscription_id);
  reader_id oid := (select r.oid from pg_roles r where r.rolname = reader);
  hidden record;
begin
  if gdq.is_administrator(reader) then
    return;
  elsif reader_id is null then
    raise exception 'role % does not exist any more', reader using errcode = 'insufficient_privilege',
      hint = 'Have an administrator give its consumer to another role: gdq.set_consumer_role().';
  end if;
  -- offset 0: check the rights on these tables only, not on every row of pg_class
  select t.table_name, c.relrowsecurity as secured into hidden
    from (select st.table_id, st.table_name, st.relid from gdq.subscribed_tables(subscription_id) st offset 0) t,
         lateral (select k.oid, k.relnamespace, k.relowner, k.relrowsecurity, k.relforcerowsecurity
                    from pg_class k where k.oid = t.relid offset 0) c
   where not has_schema_privilege(reader_id, c.relnamespace, 'usage')
      or (not has_table_privilege(reader_id, c.oid, 'select')
          and exists (select from gdq.table_version v, jsonb_to_recordset(v.columns) l(attnum smallint)
                       where v.version_id = gdq.current_version(t.table_id)
                         and has_column_privilege(reader_id, c.oid, l.attnum, 'select') is not true))
      or (c.relrowsecurity
          and not (select r.rolsuper or r.rolbypassrls or (r.oid = c.relowner and not c.relforcerowsecurity)
                     from pg_roles r where r.oid = reader_id))
   limit 1;
  if hidden.table_name is not null then
    raise exception 'role % may not read table %, which its consumer takes%', reader, hidden.table_name,
      case when hidden.secured then ' and which has row level security' else '' end
      using errcode = 'insufficient_privilege',
            hint = format('Grant SELECT on it to %I, register the consumer for other tables, '
                          'or have an administrator read it.', reader);
  end if;
end
$$;
comment on function gdq.check_consumer_tables(integer) is
  'Error 42501 when the role that owns a subscription may not read its tables.';

-- require_member(subscription_id, member): error unless a worker of a consumer with members names one of them, and a
-- worker of a consumer without members names none. Writes: nothing. Errors: 42704, 55000.
create or replace function gdq.require_member(subscription_id integer, member text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if member is null and exists (select from gdq.member m where m.subscription_id = require_member.subscription_id) then
    raise exception 'the consumer has members, and none is named' using errcode = 'object_not_in_prerequisite_state',
      hint = 'Name the member that asks; gdq.member_info() lists them.';
  elsif member is not null
        and not exists (select from gdq.member m
                         where m.subscription_id = require_member.subscription_id
                           and m.member_name = require_member.member) then
    raise exception 'the consumer has no member "%"', member using errcode = 'undefined_object',
      hint = 'Register it with gdq.register_member().';
  end if;
end
$$;
comment on function gdq.require_member(integer, text) is
  'Error unless a worker names one of the consumer''s members, or it has none.';

-- may_read(subscription_id): whether a subscription gets batches; false while the subscription or its queue is paused.
-- Writes: nothing. Errors: GDQ03 when it must copy tables first.
create or replace function gdq.may_read(subscription_id integer) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  tables text;
  why text;
begin
  select string_agg(coalesce(gdq.table_name(c.relid), 'messages'), ', ' order by c.relid), max(c.reason)
    into tables, why from gdq.cut_tables(subscription_id) c;
  if tables is not null then
    raise exception 'consumer "%" must copy anew %: %',
      (select c.consumer_name from gdq.subscription s join gdq.consumer c using (consumer_id)
        where s.subscription_id = may_read.subscription_id), tables, why
      using errcode = 'GDQ03',
            hint = 'Copy each table at a snapshot and call gdq.resynced(), '
                   'or unregister the consumer, register it anew and load afresh.';
  end if;
  return not gdq.queue_paused((select s.queue_id from gdq.subscription s
                                where s.subscription_id = may_read.subscription_id))
     and not exists (select from gdq.subscription_pause sp where sp.subscription_id = may_read.subscription_id);
end
$$;
comment on function gdq.may_read(integer) is
  'Whether a subscription gets batches; error GDQ03 when it must copy tables first.';

-- subscribed_tables(subscription_id): the captured tables that a subscription takes. Writes: nothing.
create or replace function gdq.subscribed_tables(subscription_id integer) returns setof gdq.captured_table
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  return query
    select ct.*
      from gdq.subscription s join gdq.captured_table ct using (queue_id)
     where s.subscription_id = subscribed_tables.subscription_id
       and (s.all_tables or exists (select from gdq.subscription_table st
                                     where st.subscription_id = s.subscription_id and st.table_id = ct.table_id));
end
$$;
comment on function gdq.subscribed_tables(integer) is 'The captured tables that a subscription takes.';

-- takes_messages(subscription_id): whether a subscription has the queue's messages. Writes: nothing.
create or replace function gdq.takes_messages(subscription_id integer) returns boolean
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select s.all_tables or exists (select from gdq.subscription_messages sm where sm.subscription_id = s.subscription_id)
    from gdq.subscription s where s.subscription_id = takes_messages.subscription_id
$$;
comment on function gdq.takes_messages(integer) is 'Whether a subscription has the queue''s messages.';

-- takes_table(s, table_id): whether a subscription takes a captured table; true for the event log (table_id NULL).
-- Writes: nothing.
create or replace function gdq.takes_table(s gdq.subscription, table_id integer) returns boolean
language sql stable security definer set search_path = pg_catalog, pg_temp
as $$
  select s.all_tables or table_id is null
      or exists (select from gdq.subscription_table st
                  where st.subscription_id = s.subscription_id and st.table_id = takes_table.table_id)
$$;
comment on function gdq.takes_table(gdq.subscription, integer) is 'Whether a subscription takes a captured table.';
