-- check_position(queue, position): checks whether the server still knows a position that was kept outside it; a
-- consumer that keeps its own position calls it before it reads on.
-- A server that has lost its latest transactions, by the promotion of a standby that lagged or by a restore to an
-- earlier time, may give the number of a lost tick again, but not its nonce. Ticks since the slowest consumer's are
-- always kept, so a missing one of these was lost; an older one may just have been deleted.
-- Result: true. Writes: nothing. Errors: 22023 for text that is no position; GDQ08 when the server has lost the
-- position, so that changes read before it may never have happened here, and for a position of another queue or server;
-- GDQ07 for a position of an era that has ended; GDQ02 for a position older than the ticks that are kept; 42704.
create or replace function gdq.check_position(queue text, "position" text) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  queue_of integer := gdq.find_queue(queue);
  part text[] := regexp_match("position", E'^queue/([0-9a-f-]{36})/(\\d{1,18})/([0-9a-f-]{36})/(\\d+:\\d+:[\\d,]*)$');
  era gdq.era := gdq.era_of(queue_of);
  ended timestamptz;
  nonce text;
  kept bigint;
begin
  if part is null then
    raise exception 'not a position: %', "position"
      using errcode = 'invalid_parameter_value', hint = 'gdq.position() and Batch.position give one.';
  elsif part[1] <> era.era::text then
    select min(later.started_at) into ended
      from gdq.era e join gdq.era later on later.queue_id = e.queue_id and later.era_no > e.era_no
     where e.queue_id = queue_of and e.era::text = part[1];
    if ended is null then
      raise exception 'the position is of no era of queue "%": it comes from another queue or server', queue
        using errcode = 'GDQ08', hint = 'Find the server that it comes from, or load in full.';
    end if;
    raise exception 'the position is of an era of queue "%" that ended at %', queue, ended
      using errcode = 'GDQ07', hint = 'The source was restored from a dump. Load in full, and go on from there.';
  end if;
  select t.nonce::text into nonce from gdq.tick t where t.tick_id = part[2]::bigint and t.queue_id = queue_of;
  if nonce = part[3] then
    return true;
  end if;
  select coalesce(min(p.tick_id), (gdq.last_tick(queue_of)).tick_id) into kept
    from gdq.subscription s, gdq.position_of(s.subscription_id) p where s.queue_id = queue_of;
  if nonce is null and part[2]::bigint < kept then
    raise exception 'the position at tick % is older than what queue "%" keeps', part[2], queue
      using errcode = 'GDQ02', hint = 'Load in full, and go on from there.';
  end if;
  raise exception 'diverged: queue "%" does not know the position at tick %', queue, part[2]
    using errcode = 'GDQ08',
          detail = 'The server lost its tail, as a standby that lags does when it is promoted. '
                   'What was read up to there may never have happened here.',
          hint = 'Save what you need of it, then load in full.';
end
$$;
comment on function gdq.check_position(text, text) is
  'True when the server knows a position that was kept outside it; error GDQ08 when it has lost it.';
