-- Positions: the snapshot up to which each consumer has read, the tables that it must copy, and the rows kept for it.

-- position_of(subscription_id): the current position of a subscription. Writes: nothing. Errors: 55000 when it has
-- none, which is never read as "from the start".
create or replace function gdq.position_of(subscription_id integer) returns gdq.position
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  pos gdq.position;
begin
  select * into pos
    from gdq.position p
   where p.subscription_id = position_of.subscription_id
   order by p.batch_no desc limit 1;
  if pos.batch_no is null then
    raise exception 'subscription % has no position', subscription_id
      using errcode = 'object_not_in_prerequisite_state';
  end if;
  return pos;
end
$$;
comment on function gdq.position_of(integer) is 'The current position of a subscription.';

-- latest_positions(): the current position of every subscription. Writes: nothing.
create or replace function gdq.latest_positions() returns setof gdq.position
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select (latest.p).*
    from gdq.subscription s,
         lateral (select p from gdq.position p
                   where p.subscription_id = s.subscription_id order by p.batch_no desc limit 1) latest
$$;
comment on function gdq.latest_positions() is 'The current position of every subscription.';

-- snapshot_le(a, b): whether snapshot a is not later than snapshot b: every transaction that counts as finished in a
-- does so in b. Snapshots of one primary are totally ordered by this. Writes: nothing.
create or replace function gdq.snapshot_le(a pg_snapshot, b pg_snapshot) returns boolean
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if pg_snapshot_xmax(a) > pg_snapshot_xmax(b) then
    return false;
  elsif pg_snapshot_xmin(b) = pg_snapshot_xmax(b) then
    return true;  -- nothing was running
  end if;
  return not exists (select from pg_snapshot_xip(b) x where pg_visible_in_snapshot(x, a));
end
$$;
comment on function gdq.snapshot_le(pg_snapshot, pg_snapshot) is 'Whether snapshot a is not later than snapshot b.';

-- snapshot_max(a, b): the later of two snapshots of one primary; b may be NULL. Writes: nothing.
create or replace function gdq.snapshot_max(a pg_snapshot, b pg_snapshot) returns pg_snapshot
language sql immutable security definer set search_path = pg_catalog, pg_temp
as $$
  select case when b is null or gdq.snapshot_le(b, a) then a else b end
$$;
comment on function gdq.snapshot_max(pg_snapshot, pg_snapshot) is 'The later of two snapshots.';

-- copied_tables(subscription_id): the tables that a subscription copied by itself, each with the snapshot of the copy:
-- only later changes of these tables are delivered. Writes: nothing.
create or replace function gdq.copied_tables(subscription_id integer)
  returns table (relid regclass, snapshot pg_snapshot)
language plpgsql volatile rows 1 security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  return query
    select r.relid, r.snapshot
      from (select distinct on (sr.relid) sr.relid, sr.kind, sr.snapshot from gdq.subscription_resync sr
             where sr.subscription_id = copied_tables.subscription_id and sr.kind <> 'removed'
             order by sr.relid, sr.state_id desc) r
     where r.kind = 'copied';
end
$$;
comment on function gdq.copied_tables(integer) is
  'The tables that a subscription copied by itself, with the snapshots of the copies.';

-- cut_tables(subscription_id): the tables (NULL: messages) whose changes were dropped before a subscription read them;
-- it must copy these before it gets another batch. Writes: nothing.
create or replace function gdq.cut_tables(subscription_id integer) returns table (relid regclass, reason text)
language plpgsql volatile rows 1 security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  return query
    select r.relid, r.reason
      from (select distinct on (sr.relid) sr.* from gdq.subscription_resync sr
             where sr.subscription_id = cut_tables.subscription_id and sr.kind <> 'removed'
             order by sr.relid, sr.state_id desc) r
     where r.kind = 'cut'
       and (r.relid is null
            or r.relid in (select t.relid from gdq.subscribed_tables(cut_tables.subscription_id) t
                             join pg_class c on c.oid = t.relid));
end
$$;
comment on function gdq.cut_tables(integer) is 'The tables that a subscription must copy before it gets another batch.';

-- resync_tables(subscription_id): the tables that a subscription must copy anew, with the latest reason: now, since
-- changes were dropped (cut_tables()), or when it comes to their resync event. Writes: nothing.
create or replace function gdq.resync_tables(subscription_id integer) returns table (relid regclass, reason text)
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  with off as materialized (
    select o.relid
      from (select distinct r.queue_id, r.relid
              from gdq.subscription s join gdq.resync r using (queue_id)
             where s.subscription_id = resync_tables.subscription_id) o
     where gdq.capture_state(o.queue_id, o.relid) = 'disarmed'
  )
  select c.relid, c.reason from gdq.cut_tables(resync_tables.subscription_id) c
  union all
  (select distinct on (r.relid) r.relid, r.reason
     from gdq.latest_positions() p join gdq.subscription s using (subscription_id) join gdq.resync r using (queue_id)
     left join gdq.copied_tables(resync_tables.subscription_id) c on c.relid = r.relid
    where s.subscription_id = resync_tables.subscription_id and r.kind in ('gap', 'disarmed', 'armed', 'covered')
      and (not pg_visible_in_snapshot(r.txid::text::xid8, gdq.snapshot_max(p.snapshot, c.snapshot))
           or r.relid in (select o.relid from off o))
      and r.relid in (select t.relid from gdq.subscribed_tables(resync_tables.subscription_id) t)
      and r.relid not in (select k.relid from gdq.cut_tables(resync_tables.subscription_id) k where k.relid is not null)
    order by r.relid, r.resync_id desc)
$$;
comment on function gdq.resync_tables(integer) is 'The tables that a subscription must copy anew.';

-- delivered_from(b, tbl): the snapshot after which a batch gives changes of a table: the start of the batch, or the
-- snapshot of a later copy. Writes: nothing.
create or replace function gdq.delivered_from(b gdq.batch, tbl regclass) returns pg_snapshot
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if not exists (select from gdq.subscription_resync r
                  where r.subscription_id = b.subscription_id and r.relid = tbl) then
    return b.snapshot_from;  -- the usual case
  end if;
  return gdq.snapshot_max(b.snapshot_from,
                          (select c.snapshot from gdq.copied_tables(b.subscription_id) c where c.relid = tbl));
end
$$;
comment on function gdq.delivered_from(gdq.batch, regclass) is
  'The snapshot after which a batch gives changes of a table.';

-- segment_is_consumed(segment, held): whether every row of a segment counts as finished in a snapshot. It must see
-- every committed row, so it runs in READ COMMITTED only. Writes: nothing.
create or replace function gdq.segment_is_consumed(segment regclass, held pg_snapshot) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
  consumed boolean;
begin
  execute format(
    'select not exists (select from %s where ev_txid >= $1) and not exists (select from %1$s where ev_txid = any ($2))',
    segment)
    into consumed
    using pg_snapshot_xmax(held)::text::bigint, array(select x::text::bigint from pg_snapshot_xip(held) x);
  return consumed;
end
$$;
comment on function gdq.segment_is_consumed(regclass, pg_snapshot) is
  'Whether every row of a segment counts as finished in a snapshot.';
