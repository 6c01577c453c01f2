-- Producers of messages: gdq.insert_event() and gdq.insert_events(), which are generated for the queues that exist, and
-- the functions that they call in gdq_log.

-- insert_event(queue, type, data, extra1 .. extra4): puts a message of the application into a queue, in the order of
-- its changes and in the caller's transaction. Needs EXECUTE on this function and USAGE on schema gdq, no right on a
-- table. Made by create_producers(), below.
--   type, extra1 .. extra4: text, or NULL. data: jsonb, NULL, or any text, which consumers get as a JSON string; a
--   literal without a type is text.
-- Result: the message's number, ev_id. Writes: the queue's event log.
-- Errors: 42704 when there is no such queue; 54000 for more than 100 MB as JSON; those of any INSERT.
--
-- insert_events(queue, types, data, extra1 .. extra4): puts many messages into a queue by one INSERT, in the order of
-- the arrays, which are of one length; an extra that is left out is NULL for every message.
-- Result: how many. Writes and errors: as insert_event(), and 2202E when the arrays differ in length.

-- create_producers(): makes insert_event() and insert_events() for the queues that exist. A queue's name has to lead to
-- the one static INSERT of its log: dynamic SQL costs more than twice as much, and reading gdq.queue would fail in a
-- REPEATABLE READ transaction that is older than the queue. The caller holds the advisory lock of create_queue().
-- Writes: replaces gdq.insert_event() and gdq.insert_events(), each for jsonb and for text; their grants stay.
create or replace function gdq.create_producers() returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  p record;
  names text[];
  ids integer[];
begin
  select coalesce(array_agg(q.queue_name order by q.queue_name collate "C"), '{}'),
         coalesce(array_agg(q.queue_id order by q.queue_name collate "C"), '{}')
    into names, ids
    from gdq.queue q;
  for p in select name, first, data_type, array_of, about,
                  format('gdq_log.q%%s_%s(%s, %s, extra1, extra2, extra3, extra4)', writer, first, data) as call
             from (values ('insert_event', 'jsonb', '', 'message', 'type', 'data',
                           'Puts a message into a queue; its number.'),
                          ('insert_event', 'text', '', 'message', 'type', 'pg_catalog.to_jsonb(data)',
                           'Puts a message into a queue; its number.'),
                          ('insert_events', 'jsonb', '[]', 'messages', 'types', 'data',
                           'Puts many messages into a queue; how many.'),
                          ('insert_events', 'text', '[]', 'messages', 'types',
                           'array(select pg_catalog.to_jsonb(d)'
                           ' from pg_catalog.unnest(data) with ordinality u(d, n) order by n)',
                           'Puts many messages into a queue; how many.')
                  ) producer(name, data_type, array_of, writer, first, data, about) loop
    execute format($sql$
      create or replace function gdq.%1$I(queue text, %2$s text%4$s, data %3$s%4$s,
        extra1 text%4$s default null, extra2 text%4$s default null,
        extra3 text%4$s default null, extra4 text%4$s default null)
        returns bigint language plpgsql volatile security definer
      as %5$L $sql$,
      p.name, p.first, p.data_type, p.array_of,
      format($body$begin
%sraise exception 'queue "%%" does not exist', queue using errcode = 'undefined_object',
  hint = 'List the queues with gdq.queue_info(), make one with gdq.create_queue().';
end$body$, gdq.producer_tree(names, ids, p.call)));
    execute format($sql$
      comment on function gdq.%1$I(text, text%2$s, %3$s%2$s, text%2$s, text%2$s, text%2$s, text%2$s)
      is %4$L $sql$,
      p.name, p.array_of, p.data_type, p.about);
  end loop;
end
$$;
comment on function gdq.create_producers() is 'Makes insert_event() and insert_events() for the queues that exist.';

-- replace_writers(): makes all functions anew that write into event logs, as this version of gdq makes them: the last
-- step of an install. Ticks and rotation wait until it commits, writers do not.
-- Writes: replaces gdq_log.q<queue>_event, _truncate, _message and _messages, gdq.insert_event() and
-- gdq.insert_events().
create or replace function gdq.replace_writers() returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  r record;
begin
  perform pg_advisory_xact_lock(gdq.lock_key('tick', 0));
  for r in select q.queue_id from gdq.queue q order by q.queue_id loop
    perform pg_advisory_xact_lock(gdq.lock_key('tick', r.queue_id));
    perform gdq.arm_event_log(r.queue_id,
                              (select er.current_slot from gdq.event_ring er where er.queue_id = r.queue_id));
    perform gdq.create_truncate(r.queue_id);
  end loop;
  perform gdq.create_producers();
end
$$;
comment on function gdq.replace_writers() is 'Makes all functions anew that write into event logs.';

-- arm_event_log(queue_id, slot): points the functions that write into a queue's event log at one of its segments.
-- Writes: replaces gdq_log.q<queue>_event(kind, relid, data), by which gdq writes, and those of messages.
create or replace function gdq.arm_event_log(queue_id integer, slot integer) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  execute format($sql$
      create or replace function gdq_log.q%1$s_event(kind text, relid oid, data jsonb) returns bigint
      language plpgsql security definer set search_path = pg_catalog, pg_temp
      as %2$L $sql$,
    queue_id,
    format($body$declare
  id bigint := pg_catalog.nextval('gdq_log.q%1$s_ev'::pg_catalog.regclass);
begin
  insert into gdq_log.q%1$s_s%2$s (ev_id, ev_txid, ev_time, ev_kind, ev_table, ev_data)
  values (id, pg_catalog.txid_current(), pg_catalog.clock_timestamp(), kind, relid, data);
  return id;
end$body$, queue_id, slot));
  perform gdq.arm_messages(queue_id, slot);
end
$$;
comment on function gdq.arm_event_log(integer, integer) is
  'Points the functions that write into a queue''s event log at one of its segments.';

-- arm_messages(queue_id, slot): points the message functions of a queue at one segment of its event log. Each is one
-- static INSERT, fully qualified and without a SET, which would double its cost. They run with the rights of
-- insert_event(): no code of the application runs inside them, as a cast can inside a capture function. Only large
-- values are measured, since compression turns at most 255 bytes into one.
-- Writes: creates or replaces gdq_log.q<queue>_message and _messages.
create or replace function gdq.arm_messages(queue_id integer, slot integer) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  number text := format('pg_catalog.nextval(''gdq_log.q%s_ev''::pg_catalog.regclass)', queue_id);
  target text := format('gdq_log.q%s_s%s (ev_id, ev_txid, ev_time, ev_kind, ev_type, ev_data,'
                        ' ev_extra1, ev_extra2, ev_extra3, ev_extra4)', queue_id, slot);
begin
  execute format($sql$
      create or replace function gdq_log.q%1$s_message(text, jsonb, text, text, text, text) returns bigint
      language plpgsql security invoker
      as %2$L $sql$,
    queue_id,
    format($body$declare
  id pg_catalog.int8 := %s;
begin
  if pg_catalog.pg_column_size($2) operator(pg_catalog.>) 100000
     or pg_catalog.octet_length(pg_catalog.concat($1, $3, $4, $5, $6)) operator(pg_catalog.>) 100000 then
    perform gdq.check_message($1, $2, pg_catalog.concat($3, $4, $5, $6));
  end if;
  insert into %s
  values (id, pg_catalog.txid_current(), pg_catalog.clock_timestamp(), 'message', $1, $2, $3, $4, $5, $6);
  return id;
end$body$, number, target));
  execute format($sql$
      create or replace function gdq_log.q%1$s_messages(text[], jsonb[], text[], text[], text[], text[]) returns bigint
      language plpgsql security invoker
      as %2$L $sql$,
    queue_id,
    format($body$declare
  made pg_catalog.int8;
begin
  perform gdq.check_messages($1, $2, $3, $4, $5, $6);
  insert into %s
  select %s, pg_catalog.txid_current(), pg_catalog.clock_timestamp(), 'message',
         m.type, m.data, m.extra1, m.extra2, m.extra3, m.extra4
    from rows from (pg_catalog.unnest($1), pg_catalog.unnest($2), pg_catalog.unnest($3),
                    pg_catalog.unnest($4), pg_catalog.unnest($5), pg_catalog.unnest($6))
           m(type, data, extra1, extra2, extra3, extra4)
   where case when pg_catalog.pg_column_size(m.data) operator(pg_catalog.>) 100000
                or pg_catalog.octet_length(pg_catalog.concat(m.type, m.extra1, m.extra2, m.extra3, m.extra4))
                     operator(pg_catalog.>) 100000
              then gdq.check_message(m.type, m.data, pg_catalog.concat(m.extra1, m.extra2, m.extra3, m.extra4))
              else true end;
  get diagnostics made = row_count;
  return made;
end$body$, target, number));
  execute format($sql$
      revoke execute on function
        gdq_log.q%1$s_message(text, jsonb, text, text, text, text),
        gdq_log.q%1$s_messages(text[], jsonb[], text[], text[], text[], text[])
      from public $sql$, queue_id);
end
$$;
comment on function gdq.arm_messages(integer, integer) is
  'Points the message functions of a queue at one segment of its event log.';

-- check_message(type, data, extras): error when a message is too large to be read again.
-- Writes: nothing. Errors: 54000.
create or replace function gdq.check_message(type text, data jsonb, extras text) returns boolean
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  bytes bigint := coalesce(octet_length(type), 0)::bigint + octet_length(extras)
                  + coalesce(octet_length(data::text), 0);
begin
  if bytes > gdq.message_limit() then
    raise exception 'a message of % bytes is more than the % that a queue takes', bytes, gdq.message_limit()
      using errcode = 'program_limit_exceeded', hint = 'Store the data in a table, and send its key.';
  end if;
  return true;
end
$$;
comment on function gdq.check_message(text, jsonb, text) is 'Error when a message is too large to be read again.';

-- check_messages(types, data, extra1 .. extra4): error unless the arrays are of one length; an extra may be NULL.
-- Writes: nothing. Errors: 2202E.
create or replace function gdq.check_messages(types text[], data jsonb[],
  extra1 text[], extra2 text[], extra3 text[], extra4 text[]) returns void
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if types is null or data is null
     or not cardinality(types) = all (array[cardinality(data),
                                            coalesce(cardinality(extra1), cardinality(types)),
                                            coalesce(cardinality(extra2), cardinality(types)),
                                            coalesce(cardinality(extra3), cardinality(types)),
                                            coalesce(cardinality(extra4), cardinality(types))]) then
    raise exception 'insert_events: % types, % data and extras of % are not of one length',
      cardinality(types), cardinality(data),
      concat_ws(', ', cardinality(extra1), cardinality(extra2), cardinality(extra3), cardinality(extra4))
      using errcode = 'array_subscript_error', hint = 'Give one array element for each message.';
  end if;
end
$$;
comment on function gdq.check_messages(text[], jsonb[], text[], text[], text[], text[]) is
  'Error unless the arrays of messages are of one length.';

-- message_limit(): the largest message that a queue takes, in bytes as JSON. A batch gives a message as one jsonb
-- object, which holds 256 MB, and rendering ends at 1 GB. Writes: nothing.
create or replace function gdq.message_limit() returns integer
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select 104857600
$$;
comment on function gdq.message_limit() is 'The largest message that a queue takes, in bytes as JSON.';

-- producer_tree(names, ids, call): the PL/pgSQL of a binary search for a queue by its name, which returns call with the
-- queue's id in place of %s. A comparison costs a new transaction about a microsecond, so a list would be slow with
-- many queues. Writes: nothing.
create or replace function gdq.producer_tree(names text[], ids integer[], call text) returns text
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  half integer := cardinality(names) / 2;
begin
  if cardinality(names) = 0 then
    return '';
  elsif cardinality(names) = 1 then
    return format($body$if queue operator(pg_catalog.=) %L::pg_catalog.text then
  return %s;
end if;
$body$, names[1], format(call, ids[1]));
  end if;
  return format($body$if queue collate pg_catalog."C" operator(pg_catalog.<) %L::pg_catalog.text then
%selse
%send if;
$body$,
    names[half + 1],
    gdq.producer_tree(names[:half], ids[:half], call),
    gdq.producer_tree(names[half + 1:], ids[half + 1:], call));
end
$$;
comment on function gdq.producer_tree(text[], integer[], text) is 'PL/pgSQL that finds a queue by name.';
