-- get_retries(batch_id, token): the events that an open batch brings again, in ev_id order. Handle them before those of
-- get_batch(), which are later. Reading again gives the same.
-- Result: the columns of get_batch(), retries: how often the event was put aside, and the last reason. Writes: nothing.
-- Errors: GDQ01; GDQ07; 42501; GDQ04, since an old snapshot may miss rows that rotate_control() has moved.
create or replace function gdq.get_retries(batch_id bigint, token uuid)
  returns table (ev_id bigint, ev_txid bigint, ev_time timestamptz, op text, tbl text,
                 key jsonb, old jsonb, new jsonb, origin text, retries integer, reason text)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
#variable_conflict use_column
declare
  b gdq.batch := gdq.open_batch(batch_id, token);
begin
  perform gdq.require_read_committed('get_retries');
  return query
    with copies as materialized (
      select gdq.table_name(c.relid) as name, c.snapshot
        from gdq.copied_tables(b.subscription_id) c
       where c.relid is not null
    )
    select r.ev_id, r.ev_txid, r.ev_time, r.op, r.tbl, r.key, r.old, r.new, r.origin, r.retries, r.reason
      from gdq.retry_delivery d join gdq.retry_event r on r.retry_id = d.retry_id
     where d.batch_id = b.batch_id
       and not exists (select from copies c
                        where c.name = r.tbl and pg_visible_in_snapshot(r.ev_txid::text::xid8, c.snapshot))
     order by r.ev_id, r.op, r.retry_id;
end
$$;
comment on function gdq.get_retries(bigint, uuid) is
  'The events that an open batch brings again, with the number of their retries.';

-- waiting_retries(subscription_id, due_before, most): the events that wait for a retry: a subscription put them aside
-- in finished batches, and no open or finished batch has brought them again. In the order of due_at, at most this
-- number; most NULL: all. A batch that was left behind unfinished settles nothing; an event that a later copy of its
-- table holds waits no more.
-- Sequential scans are off: a plan kept from when the tables were small would read them once for every row. Writes:
-- nothing.
create or replace function gdq.waiting_retries(subscription_id integer, due_before timestamptz, most bigint)
  returns table (retry_id bigint, due_at timestamptz)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
#variable_conflict use_column
begin
  if not exists (select from gdq.retry_event r
                  where r.subscription_id = waiting_retries.subscription_id and r.due_at <= due_before) then
    return;  -- the usual case
  end if;
  return query
    with copies as materialized (
      select gdq.table_name(c.relid) as name, c.snapshot
        from gdq.copied_tables(waiting_retries.subscription_id) c
       where c.relid is not null
    )
    select r.retry_id, r.due_at
      from gdq.retry_event r
     where r.subscription_id = waiting_retries.subscription_id and r.due_at <= due_before and not r.dead
       and (r.batch_id is null
            or exists (select from gdq.batch_end e where e.batch_id = r.batch_id and e.token = r.token))
       and not exists (select from gdq.retry_delivery d
                        where d.retry_id = r.retry_id
                          and (exists (select from gdq.batch_end e where e.batch_id = d.batch_id)
                               or exists (select from gdq.batch b
                                           where b.batch_id = d.batch_id
                                             and not gdq.is_finished(b.subscription_id, b.batch_no, b.batch_id))))
       and not exists (select from copies c
                        where c.name = r.tbl and pg_visible_in_snapshot(r.ev_txid::text::xid8, c.snapshot))
     order by r.due_at, r.retry_id limit most;
end
$$;
comment on function gdq.waiting_retries(integer, timestamptz, bigint) is
  'Events of a subscription that wait for a retry.';
