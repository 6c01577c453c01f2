-- add_sequence(queue, sequence): publishes the value of a sequence with each tick of a queue, for consumers that keep a
-- copy ready to take over: a batch comes with values that no transaction in it has passed. The owner of gdq reads it at
-- each tick, so it needs SELECT on the sequence and USAGE on its schema.
-- Result: true; false when it is published already. Writes: published_sequence.
-- Errors: 42704 for the queue; 42501; 42809 when it is no sequence, or a temporary one.
create or replace function gdq.add_sequence(queue text, sequence regclass) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '500ms'
as $$
declare
  queue_of integer := gdq.find_queue(queue);
begin
  if not exists (select from pg_class c where c.oid = sequence and c.relkind = 'S' and c.relpersistence <> 't') then
    raise exception '% is no sequence, or a temporary one', coalesce(gdq.table_name(sequence), sequence::text) using errcode = 'wrong_object_type';
  elsif not has_table_privilege(sequence, 'select')
     or not has_schema_privilege((select c.relnamespace from pg_class c where c.oid = sequence), 'usage') then
    raise exception '% may not read sequence %', current_user, gdq.table_name(sequence) using errcode = 'insufficient_privilege',
      hint = format('Grant SELECT on the sequence, and USAGE on its schema, to %I.', current_user);
  end if;
  insert into gdq.published_sequence (queue_id, relid, sequence_name) values (queue_of, sequence, gdq.table_name(sequence)) on conflict do nothing;
  return found;
end
$$;
comment on function gdq.add_sequence(text, regclass) is 'Publishes the value of a sequence with each tick of a queue; false when it was published.';

-- remove_sequence(queue, sequence): stops that. sequence: its name as sequence_info() lists it, also when it is gone.
-- Result: true; false when it was not published. Writes: deletes from published_sequence. Errors: 42704 for the queue.
create or replace function gdq.remove_sequence(queue text, sequence text) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  delete from gdq.published_sequence ps
   where ps.queue_id = gdq.find_queue(queue)
     and sequence in (gdq.table_name(ps.relid), case when gdq.table_name(ps.relid) is null then ps.sequence_name end);
  return found;
end
$$;
comment on function gdq.remove_sequence(text, text) is 'Stops publishing the values of a sequence; false when it was not published.';

-- sequence_info(queue): one row a published sequence (NULL: of all queues): its value as last published, and state: ok,
-- dropped, or unreadable when gdq's owner lost its right to read it. last_value NULL: it could not be read at that tick,
-- or no tick was taken since it was added. Writes: nothing. Errors: 42704.
create or replace function gdq.sequence_info(queue text default null)
  returns table (queue_name text, sequence_name text, last_value bigint, is_called boolean, tick bigint, state text)
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select q.queue_name, coalesce(gdq.table_name(ps.relid), ps.sequence_name), st.last_values[place], st.called[place], st.tick_id,
         case when gdq.table_name(ps.relid) is null then 'dropped'
              when has_table_privilege(ps.relid, 'select') and has_schema_privilege((select c.relnamespace from pg_class c where c.oid = ps.relid), 'usage') then 'ok'
              else 'unreadable' end
    from gdq.queue q join gdq.published_sequence ps using (queue_id)
    left join lateral gdq.sequences_at(q.queue_id, null) st on true
   cross join lateral array_position(st.sequence_ids, ps.sequence_id) place
   where queue is null or q.queue_id = gdq.find_queue(queue) order by 1, 2
$$;
comment on function gdq.sequence_info(text) is 'Published sequences with their value.';

-- sequences_at(queue_id, tick): the row that holds the values of a queue's sequences at a tick; NULL: at its last one.
-- Writes: nothing.
create or replace function gdq.sequences_at(queue_id integer, tick bigint) returns setof gdq.sequence_tick
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select st.* from gdq.sequence_tick st
   where st.queue_id = sequences_at.queue_id and (tick is null or st.tick_id <= tick) order by st.tick_id desc limit 1
$$;
comment on function gdq.sequences_at(integer, bigint) is 'The values of a queue''s sequences at a tick.';

-- read_sequence(relid): the value of a sequence; NULL when it cannot be read: it is gone, the right to read it is, or
-- somebody's DDL or TRUNCATE ... RESTART IDENTITY holds it. Nobody can take a value meanwhile. Writes: nothing.
create or replace function gdq.read_sequence(relid regclass, out last_value bigint, out is_called boolean)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '5ms'
as $$
begin
  execute 'select s.last_value, s.is_called from ' || gdq.table_name(relid) || ' s' into last_value, is_called;
exception when others then
  last_value := null;
  is_called := null;
end
$$;
comment on function gdq.read_sequence(regclass) is 'The value of a sequence; NULL when it cannot be read.';

-- publish_sequences(queue_id, tick_id): stores the values of a queue's sequences with a tick, if one has changed. They are
-- read after the tick's snapshot was taken: whoever it shows as committed had its values by then. A sequence is not
-- bound to snapshots, and with a cache its value is the last that a session has reserved. Read by name without a lock
-- that DDL would wait for, and never waited for long: one that is held is stored as unknown, since a tick must not fail.
-- Writes: sequence_tick.
create or replace function gdq.publish_sequences(queue_id integer, tick_id bigint) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '20ms'
as $$
declare
  query text;
  last gdq.sequence_tick;
  now_values gdq.sequence_tick;
begin
  begin
    select string_agg(format('select %s as id, s.last_value, s.is_called from %s s', ps.sequence_id, gdq.table_name(ps.relid)), ' union all ') into query
      from gdq.published_sequence ps where ps.queue_id = publish_sequences.queue_id and gdq.table_name(ps.relid) is not null;
    execute 'select array_agg(id order by id), array_agg(last_value order by id), array_agg(is_called order by id) from (' || query || ') s'
      into now_values.sequence_ids, now_values.last_values, now_values.called;
  exception when others then
    select array_agg(ps.sequence_id order by ps.sequence_id), array_agg(r.last_value order by ps.sequence_id), array_agg(r.is_called order by ps.sequence_id)
      into now_values.sequence_ids, now_values.last_values, now_values.called
      from gdq.published_sequence ps, gdq.read_sequence(ps.relid) r
     where ps.queue_id = publish_sequences.queue_id and gdq.table_name(ps.relid) is not null;
  end;
  select * into last from gdq.sequences_at(queue_id, null);
  if (now_values.sequence_ids, now_values.last_values, now_values.called) is distinct from (last.sequence_ids, last.last_values, last.called) then
    insert into gdq.sequence_tick (tick_id, queue_id, sequence_ids, last_values, called)
      values (tick_id, queue_id, coalesce(now_values.sequence_ids, '{}'), coalesce(now_values.last_values, '{}'), coalesce(now_values.called, '{}'));
  end if;
end
$$;
comment on function gdq.publish_sequences(integer, bigint) is 'Stores the values of a queue''s sequences with a tick, if one has changed.';

-- batch_sequences(batch_id, token, changed): the values of the queue's sequences at the end of an open batch: no
-- transaction of the batch, or before it, took one beyond, counted in the sequence's own direction. changed: only those
-- that differ from its start. setval(sequence, last_value, is_called) brings a copy to the same state. NULL where the
-- sequence could not be read at that tick: a later batch has it.
-- Result: one row a sequence, by name. Writes: nothing. Errors: GDQ01.
create or replace function gdq.batch_sequences(batch_id bigint, token uuid, changed boolean default true)
  returns table (sequence_name text, last_value bigint, is_called boolean)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  b gdq.batch := gdq.open_batch(batch_id, token);
  queue_of integer := (select s.queue_id from gdq.subscription s where s.subscription_id = b.subscription_id);
begin
  return query
    select coalesce(gdq.table_name(ps.relid), ps.sequence_name), new.last_value, new.is_called
      from gdq.sequences_at(queue_of, b.tick_to) till,
           unnest(till.sequence_ids, till.last_values, till.called) new(sequence_id, last_value, is_called)
      join gdq.published_sequence ps using (sequence_id)
      left join (select old.* from gdq.sequences_at(queue_of, b.tick_from) since,
                        unnest(since.sequence_ids, since.last_values, since.called) old(sequence_id, last_value, is_called)
                  where b.tick_from is not null) old using (sequence_id)
     where not changed or (old.last_value, old.is_called) is distinct from (new.last_value, new.is_called)
     order by 1;
end
$$;
comment on function gdq.batch_sequences(bigint, uuid, boolean) is 'The values of the queue''s sequences at the end of an open batch.';
