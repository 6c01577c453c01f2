-- The numbers of a restored queue: its positions, log rows, retries and copies get transaction numbers of this cluster.
--
-- The dump's transaction numbers mean nothing in the cluster that it was restored into. All that matters is which
-- positions have passed which rows. After initdb no transaction of a cluster has a number below 500, so these numbers
-- are free to say that: the n-th position, in ascending order, becomes era_snapshot(n), and a row that n positions have
-- not passed gets era_xid(n). Three positions A < B < C:
--
--   position          becomes                  row, passed by    gets             is read by
--   ----------------  -----------------------  ----------------  ---------------  ----------
--   the first tick    era_snapshot(0) = 3:3:   A, B and C        era_xid(0) = 3   nobody: deleted
--   A                 era_snapshot(1) = 4:4:   B and C           era_xid(1) = 4   A
--   B                 era_snapshot(2) = 5:5:   C                 era_xid(2) = 5   A, B
--   C                 era_snapshot(3) = 6:6:   none              era_xid(3) = 6   A, B, C

-- era_xid(n): the transaction number of a restored row that n positions have not passed. Writes: nothing.
create or replace function gdq.era_xid(n bigint) returns bigint
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select 3 + n
$$;
comment on function gdq.era_xid(bigint) is 'Transaction number of a restored row that n positions have not passed.';

-- era_snapshot(n): the snapshot of the n-th restored position in ascending order. It counts as finished the rows that
-- fewer than n positions have not passed. Writes: nothing.
create or replace function gdq.era_snapshot(n bigint) returns pg_snapshot
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select format('%1$s:%1$s:', gdq.era_xid(n))::pg_snapshot
$$;
comment on function gdq.era_snapshot(bigint) is 'Snapshot of the n-th restored position in ascending order.';

-- rebase_positions(queue_id): the positions of a restored queue's consumers, in ascending order, with the snapshots
-- that replace them.
-- Result: one row for each position: old_snapshot, new_snapshot, event_seq. Writes: nothing. Errors: 54000 for more
-- than 500.
create or replace function gdq.rebase_positions(queue_id integer)
  returns table (old_snapshot pg_snapshot, new_snapshot pg_snapshot, event_seq bigint)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if (select count(distinct p.snapshot::text) from gdq.subscription s, gdq.position_of(s.subscription_id) p
       where s.queue_id = rebase_positions.queue_id) > 500 then
    raise exception 'the consumers have more than 500 different positions'
      using errcode = 'program_limit_exceeded', hint = 'Unregister consumers that can start anew.';
  end if;
  return query
    select ordered.snapshot, gdq.era_snapshot(ordered.n), ordered.event_seq
      from (select used.snapshot, used.event_seq,
                   row_number() over (order by pg_snapshot_xmax(used.snapshot),
                                               (select count(*) from pg_snapshot_xip(used.snapshot)) desc) as n
              from (select p.snapshot::text::pg_snapshot as snapshot, max(p.event_seq) as event_seq
                      from gdq.subscription s, gdq.position_of(s.subscription_id) p
                     where s.queue_id = rebase_positions.queue_id
                     group by p.snapshot::text) used) ordered
     order by ordered.n;
end
$$;
comment on function gdq.rebase_positions(integer) is 'The positions of a restored queue as snapshots of this cluster.';

-- move_rows(segment, positions, keep_below): gives the rows of a restored log segment transaction numbers of this
-- cluster, by the number of positions that have not passed them, and deletes the rows that all positions have passed. A
-- row with an ev_id above keep_below may have been written after the restore: no position has passed it. Writes: the
-- segment.
create or replace function gdq.move_rows(segment regclass, positions pg_snapshot[], keep_below bigint) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  execute format($sql$
    delete from %s
     where ev_id <= $2
       and not exists (select from unnest($1) p where not pg_visible_in_snapshot(ev_txid::text::xid8, p)) $sql$,
    gdq.table_name(segment)) using positions, keep_below;
  -- era_xid() of the number of positions that have not passed the row; not called for each row
  execute format($sql$
    update %s
       set ev_txid = $3 + case when ev_id > $2 then cardinality($1)
                               else (select count(*) from unnest($1) p
                                      where not pg_visible_in_snapshot(ev_txid::text::xid8, p)) end $sql$,
    gdq.table_name(segment)) using positions, keep_below, gdq.era_xid(0);
end
$$;
comment on function gdq.move_rows(regclass, pg_snapshot[], bigint) is
  'Gives the rows of a restored log transaction numbers of this cluster.';

-- rebase_events(queue_id, keep, positions, keep_below): gives the event log of a restored queue transaction numbers of
-- this cluster. Messages stay for the positions that have not passed them. Other events are deleted, since a resync
-- event replaces them. With keep they stay, under the oids that their tables have in this database; the names of the
-- tables' triggers contain the old oids. Writes: the event log.
create or replace function gdq.rebase_events(queue_id integer, keep boolean, positions pg_snapshot[], keep_below bigint)
  returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  log regclass;
begin
  for log in select s from gdq.event_segments(queue_id) s loop
    if keep then
      execute format($sql$
        update %s e
           set ev_table = r.relid
          from (select distinct split_part(tg.tgname, '_', 2)::oid as was, ct.relid::oid
                  from gdq.captured_table ct
                  join pg_trigger tg on tg.tgrelid = ct.relid and tg.tgname ~ %L
                 where ct.queue_id = %s) r
         where e.ev_table = r.was $sql$,
        gdq.table_name(log), format(E'^!gdq_\\d+_%s_i$', queue_id), queue_id);
    else
      execute format('delete from %s where ev_kind <> ''message'' or ev_id is null', gdq.table_name(log));
    end if;
    perform gdq.move_rows(log, positions, keep_below);
  end loop;
end
$$;
comment on function gdq.rebase_events(integer, boolean, pg_snapshot[], bigint) is
  'Gives the event log of a restored queue transaction numbers of this cluster.';

-- rebase_retries(queue_id): gives the retries and dead letters of a restored queue a transaction number that every
-- position and every later copy of their table has passed, so that retries go on waiting: the dump's own number may lie
-- ahead of this cluster's. Retries whose events a copy of the table holds are deleted: rebase_resync() forgets the
-- copies, and these retries would come again. Writes: retry_event, dead_letter.
create or replace function gdq.rebase_retries(queue_id integer) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  delete from gdq.retry_event r
   using gdq.subscription s, gdq.copied_tables(s.subscription_id) c
   where s.queue_id = rebase_retries.queue_id and r.subscription_id = s.subscription_id
     and gdq.table_name(c.relid) = r.tbl and pg_visible_in_snapshot(r.ev_txid::text::xid8, c.snapshot);
  update gdq.retry_event r
     set ev_txid = gdq.era_xid(0)
    from gdq.subscription s
   where s.queue_id = rebase_retries.queue_id and r.subscription_id = s.subscription_id;
  update gdq.dead_letter d
     set ev_txid = gdq.era_xid(0)
    from gdq.subscription s
   where s.queue_id = rebase_retries.queue_id and d.subscription_id = s.subscription_id;
end
$$;
comment on function gdq.rebase_retries(integer) is
  'Gives the retries and dead letters of a restored queue a transaction number of this cluster.';

-- rebase_resync(queue_id, keep): replaces the snapshots in subscription_resync of a restored queue, which mean nothing
-- in this cluster. With keep, a table that a consumer had copied at a snapshot after its position must be copied anew;
-- without keep, a resync event asks for that for every table. The new snapshot 1:1: lies before every position, and no
-- seek leads back to before the restore. Writes: subscription_resync. Errors: 55000 when an event of a removed table
-- would not reach its consumer.
create or replace function gdq.rebase_resync(queue_id integer, keep boolean) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  s integer;
begin
  perform gdq.trim_resync();
  for s in select ss.subscription_id from gdq.subscription ss where ss.queue_id = rebase_resync.queue_id loop
    if keep and exists (select from gdq.subscription_resync r, gdq.position_of(s) p
                         where r.subscription_id = s
                           and r.kind = 'removed'
                           and not pg_visible_in_snapshot(r.txid::text::xid8, p.snapshot)) then
      raise exception 'the positions of the queue cannot be kept: '
                      'a table was removed, and not all consumers had come to that'
        using errcode = 'object_not_in_prerequisite_state',
              hint = 'Rebase without keep: every consumer then reads its tables afresh.';
    end if;
    insert into gdq.subscription_resync (subscription_id, relid, kind, snapshot, reason)
      select s, c.relid, 'cut', '1:1:', 'copied, and restored from a dump before what follows was read'
        from gdq.copied_tables(s) c, gdq.position_of(s) p
       where keep and c.relid is not null and not gdq.snapshot_le(c.snapshot, p.snapshot);
    delete from gdq.subscription_resync r where r.subscription_id = s and r.kind <> 'cut';
    update gdq.subscription_resync r set snapshot = '1:1:' where r.subscription_id = s;
  end loop;
end
$$;
comment on function gdq.rebase_resync(integer, boolean) is
  'Replaces the snapshots in subscription_resync of a restored queue.';
