-- rebase_positions(queue_id): the positions of a restored queue, in order, as snapshots of this cluster. It never had
-- transactions below 500 after its making, so these low numbers are free to stand for "before anything": the position
-- that is n-th from below becomes 3+n:3+n:. A row of the log that c of the positions have not passed gets 3+c.
-- Result: one row a position in use (old, new, event_seq). Writes: nothing. Errors: 54000 for more than 500.
create or replace function gdq.rebase_positions(queue_id integer)
  returns table (old_snapshot pg_snapshot, new_snapshot pg_snapshot, event_seq bigint)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if (select count(distinct p.snapshot::text) from gdq.subscription s, gdq.position_of(s.subscription_id) p
       where s.queue_id = rebase_positions.queue_id) > 500 then
    raise exception 'the consumers have more than 500 different positions' using errcode = 'program_limit_exceeded',
      hint = 'Unregister consumers that can start anew.';
  end if;
  return query
    select used.s::pg_snapshot,
           format('%s:%1$s:', 3 + row_number() over (order by pg_snapshot_xmax(used.s::pg_snapshot),
             (select count(*) from pg_snapshot_xip(used.s::pg_snapshot)) desc))::pg_snapshot, used.seq
      from (select p.snapshot::text as s, max(p.event_seq) as seq
              from gdq.subscription s, gdq.position_of(s.subscription_id) p
             where s.queue_id = rebase_positions.queue_id group by 1) used
     order by pg_snapshot_xmax(used.s::pg_snapshot), (select count(*) from pg_snapshot_xip(used.s::pg_snapshot)) desc;
end
$$;
comment on function gdq.rebase_positions(integer) is 'The positions of a restored queue as snapshots of this cluster.';

-- rebase_events(queue_id, keep, positions, keep_below): the event log of a restored queue: messages stay unread for
-- whoever has not passed them. What else it holds goes, since a resync event says more; with keep it stays likewise,
-- under the tables' oids of this database, which their triggers' names lead to. Writes: the event log.
create or replace function gdq.rebase_events(queue_id integer, keep boolean, positions pg_snapshot[], keep_below bigint)
  returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  log regclass;
begin
  for log in select s from gdq.event_segments(queue_id) s loop
    if keep then
      execute format('update %s e set ev_table = r.relid from (select distinct split_part(tg.tgname, ''_'', 2)::oid as was, ct.relid::oid '
        'from gdq.captured_table ct join pg_trigger tg on tg.tgrelid = ct.relid and tg.tgname ~ %L where ct.queue_id = %s) r where e.ev_table = r.was',
        gdq.table_name(log), format('^!gdq_\d+_%s_i$', queue_id), queue_id);
    else
      execute format('delete from %s where ev_kind <> ''message''', gdq.table_name(log));
    end if;
    perform gdq.move_rows(log, positions, keep_below);
  end loop;
end
$$;
comment on function gdq.rebase_events(integer, boolean, pg_snapshot[], bigint) is
  'Gives the event log of a restored queue numbers of this cluster.';

-- rebase_retries(queue_id): what waits to be retried goes on waiting, under a number that every position and every
-- later copy of its table has passed: the dump's own may lie ahead of this cluster's. What a copy holds, which the
-- copies of the dump do not tell any more, would come again: it goes. Writes: retry_event, dead_letter.
create or replace function gdq.rebase_retries(queue_id integer) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  delete from gdq.retry_event r
   using gdq.subscription s, gdq.copied_tables(s.subscription_id) c
   where s.queue_id = rebase_retries.queue_id and r.subscription_id = s.subscription_id
     and gdq.table_name(c.relid) = r.tbl and pg_visible_in_snapshot(r.ev_txid::text::xid8, c.snapshot);
  update gdq.retry_event r set ev_txid = 3 from gdq.subscription s where s.queue_id = rebase_retries.queue_id and r.subscription_id = s.subscription_id;
  update gdq.dead_letter d set ev_txid = 3 from gdq.subscription s where s.queue_id = rebase_retries.queue_id and d.subscription_id = s.subscription_id;
end
$$;
comment on function gdq.rebase_retries(integer) is
  'Gives the retries and dead letters of a restored queue a number of this cluster.';
