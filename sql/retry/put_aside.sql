-- put_aside(batch_id, token, ev_ids, ops, delay, reasons, dead, counted): does what retry_event() does, or with dead
-- what dead_letter() does, for many events at once. The lists ev_ids, ops and reasons have one element for each event.
-- The events are stored as get_batch() or get_retries() shows them, since their log may be truncated before they come
-- again. An event that this token has put aside already is left as it is. Planned at each call: one plan does not serve
-- both a single event and thousands.
--   counted: false for events that were not tried, since they wait for an earlier one: they do not come nearer to the
--   limit of retries, and never become dead letters here.
-- Result: how many events come again; the others are dead letters. Writes: retry_event. Errors: as retry_event().
create or replace function gdq.put_aside(batch_id bigint, token uuid, ev_ids bigint[], ops text[], delay interval,
  reasons text[], dead boolean, counted boolean default true) returns bigint
language plpgsql volatile security definer
  set search_path = pg_catalog, pg_temp set enable_seqscan = off set plan_cache_mode = force_custom_plan
as $$
#variable_conflict use_column
declare
  b gdq.batch;
  most integer;
  missing bigint;
begin
  perform gdq.require_read_committed('a retry');
  if delay is null or delay < interval '0' or delay > interval '1000 years' then
    raise exception 'the delay of a retry must be between 0 and 1000 years' using errcode = 'invalid_parameter_value';
  end if;
  perform pg_advisory_xact_lock_shared(gdq.token_key(token));
  b := gdq.open_batch(batch_id, token);
  most := coalesce((select l.retries from gdq.retry_limit l where l.subscription_id = b.subscription_id), 10);
  insert into gdq.retry_event (subscription_id, batch_id, token, ev_id, ev_txid, ev_time, op, tbl, key, old, new,
                               origin, retries, due_at, dead, reason)
    select distinct on (e.ev_id, e.op)
           b.subscription_id, b.batch_id, put_aside.token,
           e.ev_id, e.ev_txid, e.ev_time, e.op, e.tbl, e.key, e.old, e.new, e.origin,
           case when put_aside.dead or (put_aside.counted and e.retries >= most) then e.retries
                when put_aside.counted then e.retries + 1 else greatest(e.retries, 1) end, clock_timestamp() + delay,
           put_aside.dead or (put_aside.counted and e.retries >= most), a.reason
      from gdq.batch_events(b.batch_id, put_aside.token, ev_ids) e
      join unnest(ev_ids, ops, reasons) a(ev_id, op, reason) on a.ev_id = e.ev_id and (a.op is null or a.op = e.op)
     where not exists (select from gdq.retry_event r
                        where r.batch_id = b.batch_id and r.token = put_aside.token
                          and r.ev_id = e.ev_id and r.op = e.op)
     order by e.ev_id, e.op;
  select a.ev_id into missing
    from unnest(ev_ids, ops) a(ev_id, op)
   where not exists (select from gdq.retry_event r
                      where r.batch_id = b.batch_id and r.token = put_aside.token
                        and r.ev_id = a.ev_id and (a.op is null or r.op = a.op))
   limit 1;
  if missing is not null then
    raise exception 'batch % holds no event %', b.batch_id, missing using errcode = 'undefined_object';
  elsif exists (select from gdq.retry_event r
                 where r.batch_id = b.batch_id and r.token = put_aside.token and r.op = 'resync') then
    raise exception 'a gap in capture cannot be put aside'
      using errcode = 'object_not_in_prerequisite_state', hint = 'Load the table afresh.';
  end if;
  return (
    select count(*)
      from unnest(ev_ids, ops) a(ev_id, op)
     where exists (select from gdq.retry_event r
                    where r.batch_id = b.batch_id and r.token = put_aside.token
                      and r.ev_id = a.ev_id and (a.op is null or r.op = a.op) and not r.dead));
end
$$;
comment on function gdq.put_aside(bigint, uuid, bigint[], text[], interval, text[], boolean, boolean) is
  'Puts many events of an open batch aside, for a retry or as dead letters; returns how many come again.';

-- batch_events(batch_id, token, numbers): the events with these numbers in an open batch. An event that the batch
-- brings again is given as by get_retries(), any other as by get_batch(), with the settings of get_batch(). Writes:
-- nothing. Errors: GDQ01.
create or replace function gdq.batch_events(batch_id bigint, token uuid, numbers bigint[])
  returns table (ev_id bigint, ev_txid bigint, ev_time timestamptz, op text, tbl text,
                 key jsonb, old jsonb, new jsonb, origin text, retries integer)
language plpgsql volatile security definer
  set search_path = pg_catalog, pg_temp set enable_seqscan = off set max_parallel_workers_per_gather = 0
  set datestyle = 'ISO, YMD' set intervalstyle = postgres set timezone = 'UTC' set extra_float_digits = 1
  set bytea_output = hex set lc_monetary = 'C' set quote_all_identifiers = off set xmlbinary = base64
as $$
#variable_conflict use_column
declare
  b gdq.batch := gdq.open_batch(batch_id, token);
  events text;
  brought bigint[];
begin
  brought := array(select r.ev_id from gdq.get_retries(b.batch_id, batch_events.token) r where r.ev_id = any (numbers));
  if brought <> '{}' then
    return query
      select r.ev_id, r.ev_txid, r.ev_time, r.op, r.tbl, r.key, r.old, r.new, r.origin, r.retries
        from gdq.get_retries(b.batch_id, batch_events.token) r where r.ev_id = any (brought);
    numbers := array(select n from unnest(numbers) n where n <> all (brought));
  end if;
  if numbers <> '{}' then
    events := gdq.subscription_events_sql(b.subscription_id, b.snapshot_from, b.snapshot_to);
    return query execute 'select *, 0 from (' || events || ') e where ev_id = any ($1)' using numbers;
  end if;
end
$$;
comment on function gdq.batch_events(bigint, uuid, bigint[]) is 'The events with these numbers in an open batch.';
