-- log_depth(queue_id, positions): for every log segment with rows and every event number of positions, the bytes from
-- the first page with a later event on. Numbers grow along a log but for transactions that overlap, so this is a binary
-- search. The locks of one segment are given back before the next, by rolling the block back: a thousand would fill the
-- lock table, and hold truncation up. Writes: nothing.
create or replace function gdq.log_depth(queue_id integer, positions bigint[])
  returns table (table_id integer, event_seq bigint, bytes bigint)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
#variable_conflict use_column
declare
  block constant bigint := current_setting('block_size')::bigint;
  log record;
  pages bigint;
  newest bigint;
  found_bytes bigint[];
begin
  for log in select z.table_id, z.segment, z.bytes from gdq.log_sizes(log_depth.queue_id) z loop
    found_bytes := null;
    begin
      pages := log.bytes / block;
      execute format('select max(ev_id) from %s where ctid >= $1', log.segment) into newest using format('(%s,0)', pages - 1)::tid;
      -- the only page need not be searched
      if pages = 1 then
        found_bytes := array(select case when newest <= p then 0 else block end from unnest(positions) with ordinality u(p, n) order by n);
      else
        found_bytes := array(select case when newest <= p then 0 else gdq.bytes_after(log.segment, pages, p) end from unnest(positions) with ordinality u(p, n) order by n);
      end if;
      raise exception 'give the locks back';
    exception when raise_exception or lock_not_available or undefined_table or internal_error then
      null;
    end;
    return query select log.table_id, p.event_seq, p.b from unnest(positions, found_bytes) p(event_seq, b) where p.b > 0;
  end loop;
end
$$;
comment on function gdq.log_depth(integer, bigint[]) is
  'Bytes of every log with rows that hold events after these numbers.';

-- bytes_after(segment, pages, after): the bytes of a log segment that has an event after that number, from the first
-- page with such an event on. Writes: nothing.
create or replace function gdq.bytes_after(segment regclass, pages bigint, after bigint) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
  seen bigint;
  low bigint := 0;
  high bigint := pages;
  middle bigint;
begin
  while low < high loop
    middle := (low + high) / 2;
    execute format('select ev_id from %s where ctid >= $1 and ev_id is not null limit 1', segment) into seen using format('(%s,0)', middle)::tid;
    if seen <= after then
      low := middle + 1;
    else
      high := middle;
    end if;
  end loop;
  -- the first page of which all rows are later; the one before it may hold some
  return (pages - greatest(low - 1, 0)) * current_setting('block_size')::bigint;
end
$$;
comment on function gdq.bytes_after(regclass, bigint, bigint) is
  'Bytes of a log segment from the first page with an event after a number.';
