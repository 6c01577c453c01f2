-- rotate_control(patient, bytes_max): keeps those control tables small that get rows with every tick and batch. Each
-- has two slots: a table whose written slot has grown past bytes_max (256 kB) switches to the other slot, and a later
-- call empties the slot that was left.
--   patient: waits 100 ms for readers of a slot, and consumers wait meanwhile. One call in ten does, at random: with
--   many readers a slot is seldom free by chance.
-- Result: how many slots were emptied. Writes: the control tables that rotate. Errors: GDQ04.
create or replace function gdq.rotate_control(patient boolean default random() < 0.1, bytes_max bigint default 262144)
  returns integer
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  kind text;
  written integer;
  cleared integer := 0;
begin
  if not pg_try_advisory_xact_lock(gdq.lock_key('control', 0)) then
    return 0;
  end if;
  foreach kind in array array['tick', 'sequence_tick', 'position', 'batch', 'batch_token', 'retry_event',
                              'retry_delivery', 'batch_end'] loop
    written := coalesce(pg_sequence_last_value(format('gdq.%I', kind || '_slot')::regclass), 0) % 2;
    if pg_relation_size(format('gdq.%I', kind || '_' || 1 - written)::regclass) > 0 then
      cleared := cleared + gdq.clear_control(kind, 1 - written, patient)::integer;
    elsif pg_relation_size(format('gdq.%I', kind || '_' || written)::regclass) >= greatest(bytes_max, 1) then
      perform nextval(format('gdq.%I', kind || '_slot')::regclass);
    end if;
  end loop;
  perform gdq.empty_truncation(bytes_max);
  return cleared;
end
$$;
comment on function gdq.rotate_control(boolean, bigint) is
  'Switches control tables that have grown to their other slot, and empties the slots that were left.';

-- empty_truncation(bytes_max): empties the notes of TRUNCATE of each queue, see create_truncate(), when they have grown
-- past bytes_max and no transaction that wrote any is under way: a transaction needs only its own. Writes:
-- gdq_log.q<queue>_truncation.
create or replace function gdq.empty_truncation(bytes_max bigint) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  notes regclass;
begin
  for notes in select n from gdq.queue q, to_regclass(format('gdq_log.q%s_truncation', q.queue_id)) n
                where pg_relation_size(n) >= greatest(bytes_max, 1) loop
    begin
      execute format('lock table only %s in access exclusive mode nowait', notes);
      execute format('truncate only %s', notes);
    exception when lock_not_available then
      null;
    end;
  end loop;
end
$$;
comment on function gdq.empty_truncation(bigint) is 'Empties the notes of TRUNCATE statements when nobody needs them.';

-- clear_control(kind, slot, patient): empties the slot of a control table that is not written, once at most 1,000 of
-- its rows are needed: these are copied into the written slot first. The slot is locked before, so it holds no
-- uncommitted rows, and every later reader takes its snapshot after this transaction's end. A reader with an older
-- snapshot has locked gdq.pin: clear_control() waits for that lock (patient: 100 ms) or gives up.
-- Result: whether the slot was emptied. Writes: the control table. Errors: GDQ04.
create or replace function gdq.clear_control(kind text, slot integer, patient boolean) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '100ms'
as $$
declare
  needed constant text := gdq.needed_control_sql(kind, slot);
  many boolean;
  columns text;
begin
  perform gdq.require_read_committed('maintain');
  execute format('select count(*) > 1000 from (%s limit 1001) r', needed) into many;
  if many then
    return false;
  end if;
  select string_agg(quote_ident(a.attname), ', ' order by a.attnum) into columns
    from pg_attribute a
   where a.attrelid = format('gdq.%I', kind)::regclass and a.attnum > 0 and not a.attisdropped and a.attname <> 'slot';
  execute format('lock table only gdq.pin, only gdq.%I in access exclusive mode %s',
                 kind || '_' || slot, case when not patient then 'nowait' end);
  execute format('insert into gdq.%I (%s) select %2$s from (%s) r', kind, columns, needed);
  execute format('truncate only gdq.%I', kind || '_' || slot);
  return true;
exception when lock_not_available then
  return false;
end
$$;
comment on function gdq.clear_control(text, integer, boolean) is
  'Empties the slot of a control table that is not written, and keeps the rows that are needed.';

-- needed_control_sql(kind, slot): a SELECT of the rows in one slot of a control table that are still needed; the
-- comment before each says which. Rows that tell the state of a retry are kept as long as the retry (its states:
-- retry/retry_event.sql). Writes: nothing.
create or replace function gdq.needed_control_sql(kind text, slot integer) returns text
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select format(case kind
    -- ticks from the oldest one that is needed
    when 'tick' then $sql$
      select r.*
        from (select q.queue_id, gdq.oldest_tick(q.queue_id) as tick_id from gdq.queue q) o
        join gdq.%I r on r.queue_id = o.queue_id and r.tick_id >= o.tick_id $sql$
    -- values of sequences from the last ones at or before that tick
    when 'sequence_tick' then $sql$
      select r.*
        from (select q.queue_id, (select st.tick_id from gdq.sequences_at(q.queue_id, gdq.oldest_tick(q.queue_id)) st)
                     as tick_id
                from gdq.queue q) o
        join gdq.%I r on r.queue_id = o.queue_id and r.tick_id >= coalesce(o.tick_id, 0) $sql$
    -- the latest position of each subscription
    when 'position' then $sql$
      select r.*
        from gdq.latest_positions() p
        join gdq.%I r on r.subscription_id = p.subscription_id and r.batch_no = p.batch_no $sql$
    -- open batches, and the one finished last: a second finish_batch() of it must return false
    when 'batch' then $sql$
      select r.*
        from gdq.latest_positions() p
        join gdq.%I r on r.subscription_id = p.subscription_id and r.batch_no >= p.batch_no $sql$
    -- the newest token of each of those batches
    when 'batch_token' then $sql$
      select r.*
        from gdq.latest_positions() p
        join gdq.batch b on b.subscription_id = p.subscription_id and b.batch_no >= p.batch_no
        join gdq.%I r on r.batch_id = b.batch_id
       where not exists (select from gdq.batch_token n where n.batch_id = r.batch_id and n.grant_id > r.grant_id) $sql$
    -- retries that are put aside, waiting or brought: neither settled, nor void, nor in a later copy of their table
    when 'retry_event' then $sql$
      with copies as materialized (
        select s.subscription_id, gdq.table_name(c.relid) as name, c.snapshot
          from gdq.subscription s, gdq.copied_tables(s.subscription_id) c
         where c.relid is not null
      )
      select r.*
        from gdq.%I r
       where not exists (select from gdq.retry_delivery d join gdq.batch_end e on e.batch_id = d.batch_id
                          where d.retry_id = r.retry_id)
         and not exists (select from copies c
                          where c.subscription_id = r.subscription_id and c.name = r.tbl
                            and pg_visible_in_snapshot(r.ev_txid::text::xid8, c.snapshot))
         and (r.batch_id is null
              or (not r.dead
                  and exists (select from gdq.batch_end e where e.batch_id = r.batch_id and e.token = r.token))
              or exists (select from gdq.batch b
                          where b.batch_id = r.batch_id
                            and not gdq.is_finished(b.subscription_id, b.batch_no, b.batch_id))) $sql$
    -- deliveries of retries that are kept
    when 'retry_delivery' then $sql$
      select r.*
        from gdq.%I r
       where exists (select from gdq.retry_event e where e.retry_id = r.retry_id) $sql$
    -- ends of batches that members finished before an older one, or that put aside or brought a retry that is kept
    when 'batch_end' then $sql$
      select r.*
        from gdq.latest_positions() p
        join gdq.%I r on r.subscription_id = p.subscription_id
       where r.batch_no > p.batch_no
          or exists (select from gdq.retry_event e where e.batch_id = r.batch_id)
          or exists (select from gdq.retry_delivery d where d.batch_id = r.batch_id) $sql$
    end, kind || '_' || slot)
$$;
comment on function gdq.needed_control_sql(text, integer) is
  'SELECT of the rows in one slot of a control table that are still needed.';

-- oldest_tick(queue_id): the oldest tick of a queue that a position names or that the retention reaches back to. The
-- retention counts as a minute at least, so that a consumer can register at a tick that was just seen. Writes: nothing.
create or replace function gdq.oldest_tick(queue_id integer) returns bigint
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select least(gdq.retained_tick(q.queue_id, greatest(q.retention, interval '1 minute')),
               (select min(p.tick_id)
                  from gdq.subscription s join gdq.latest_positions() p using (subscription_id)
                 where s.queue_id = q.queue_id))
    from gdq.queue q
   where q.queue_id = oldest_tick.queue_id
$$;
comment on function gdq.oldest_tick(integer) is 'The oldest tick of a queue that a position or the retention needs.';
