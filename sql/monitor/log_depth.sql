-- log_depth(queue_id, positions): how many bytes of each log segment a reader at an event number still has to read:
-- from the first page with a later event on. Result: one row for each segment with such bytes and each number of
-- positions. Writes: nothing.
create or replace function gdq.log_depth(queue_id integer, positions bigint[])
  returns table (table_id integer, event_seq bigint, bytes bigint)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
#variable_conflict use_column
declare
  log record;
begin
  for log in select z.table_id, z.segment, z.bytes from gdq.log_sizes(log_depth.queue_id) z loop
    return query
      select log.table_id, p.event_seq, p.bytes
        from unnest(positions, gdq.bytes_after_without_locks(log.segment, log.bytes, positions)) p(event_seq, bytes)
       where p.bytes > 0;
  end loop;
end
$$;
comment on function gdq.log_depth(integer, bigint[]) is
  'Bytes of each log segment from the first event after a number on.';

-- bytes_after_without_locks(segment, bytes, positions): bytes_after() of a log segment for each number of positions;
-- NULL when the segment is locked or gone. The lock on the segment is given back at once, by rolling the block back:
-- locks of a thousand segments would fill the lock table and hold truncation up. Writes: nothing.
create or replace function gdq.bytes_after_without_locks(segment regclass, bytes bigint, positions bigint[])
  returns bigint[]
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
as $$
declare
  block constant bigint := current_setting('block_size')::bigint;
  pages constant bigint := bytes / block;
  newest bigint;
  found_bytes bigint[];
begin
  execute format('select max(ev_id) from %s where ctid >= $1', segment)
    into newest using format('(%s,0)', pages - 1)::tid;
  found_bytes := array(select case when newest <= p then 0
                                   when pages = 1 then block  -- the only page need not be searched
                                   else gdq.bytes_after(segment, pages, p) end
                         from unnest(positions) with ordinality u(p, n) order by n);
  raise exception using errcode = 'GDQ00';
exception when sqlstate 'GDQ00' or lock_not_available or undefined_table or internal_error then
  return found_bytes;
end
$$;
comment on function gdq.bytes_after_without_locks(regclass, bigint, bigint[]) is
  'Bytes of a log segment after some event numbers, with no lock kept.';

-- bytes_after(segment, pages, after): bytes of a log segment from the first page on that has an event with a number
-- above after. Numbers grow along a log, except those of overlapping transactions, so a binary search finds the page.
-- Writes: nothing.
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
    execute format('select ev_id from %s where ctid >= $1 and ev_id is not null limit 1', segment)
      into seen using format('(%s,0)', middle)::tid;
    if seen <= after then
      low := middle + 1;
    else
      high := middle;
    end if;
  end loop;
  -- low is the first page that begins with a later event; the page before it may hold some too
  return (pages - greatest(low - 1, 0)) * current_setting('block_size')::bigint;
end
$$;
comment on function gdq.bytes_after(regclass, bigint, bigint) is
  'Bytes of a log segment from the first page with an event after a number.';
