-- The alarm: a sequence that the DDL guard advances before it does anything. A sequence can always be advanced:
-- nextval() waits for nobody, needs no room in a table, and outlives the rollback of what called it. When the guard has
-- recorded everything it answers the value. A tick compares the witness where a value has no answer: then the guard
-- failed, or the DDL was rolled back.

-- raise_alarm(): raises the alarm for the current command, and tells others by a shared lock that this transaction is
-- altering tables. Result: the value to answer; NULL when even the sequence was taken away. Writes: the sequence alarm.
create or replace function gdq.raise_alarm() returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  begin
    -- before the value is drawn: whoever sees the value sees the lock, or what this transaction has done
    perform pg_try_advisory_xact_lock_shared(gdq.lock_key('alarm', 0));
  exception when others then
    null;
  end;
  return nextval('gdq.alarm');
exception when others then
  raise log 'gdq: the alarm of the DDL guard could not be raised: %', sqlerrm;
  return null;
end
$$;
comment on function gdq.raise_alarm() is 'Raises the alarm for the current DDL command; returns the value to answer.';

-- answer_alarm(value): notes that everything is recorded that the command with this value of the alarm has done. When
-- it cannot, the witness is compared for nothing. Writes: alarm_answer.
create or replace function gdq.answer_alarm(value bigint) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  insert into gdq.alarm_answer (value) select answer_alarm.value where answer_alarm.value is not null;
exception when others then
  raise log 'gdq: alarm % could not be answered: %', value, sqlerrm;
end
$$;
comment on function gdq.answer_alarm(bigint) is 'Notes that everything is recorded that a command has done.';

-- alarms(): the state of the alarm.
-- Result: seen: its value now; open: the transactions that are altering tables; due: whether the witness has to be
-- compared; settled: up to which value nothing is open once that is done; changed: whether that is news. Writes:
-- nothing.
create or replace function gdq.alarms(out seen bigint, out open text[], out settled bigint, out due boolean,
                                      out changed boolean)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  last gdq.alarm_check;
  answered boolean;
begin
  -- in this order: the value, who is at work, and then what is answered and what the catalogs hold
  select case when a.is_called then a.last_value else 0 end into seen from gdq.alarm a;
  select * into last from gdq.alarm_check c order by c.check_id desc limit 1;
  if last.settled = seen then
    settled := seen;
    due := false;
    changed := false;
    return;
  end if;
  open := array(select l.virtualtransaction from pg_locks l
                 where l.locktype = 'advisory' and l.granted and l.objsubid = 1 and l.objid = 0
                   and l.classid::bigint = gdq.lock_key('alarm', 0) >> 32
                   and l.database = (select d.oid from pg_database d where d.datname = current_database())
                 order by 1);
  answered := seen - last.settled = (select count(distinct r.value) from gdq.alarm_answer r
                                      where r.value > last.settled and r.value <= seen);
  changed := last.seen <> seen or last.open <> open;
  due := changed and not answered;
  changed := changed or answered;
  -- a transaction at work may have raised any value that has no answer yet
  settled := case when answered or open = '{}' then seen else last.settled end;
end
$$;
comment on function gdq.alarms() is 'The state of the alarm: whether the witness has to be compared.';

-- settle_alarms(seen, open, settled): notes that the witness was compared, or that it was not needed. The arguments are
-- the results of alarms() before. Writes: alarm_check.
create or replace function gdq.settle_alarms(seen bigint, open text[], settled bigint) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  insert into gdq.alarm_check (settled, seen, open) values (settled, seen, open);
end
$$;
comment on function gdq.settle_alarms(bigint, text[], bigint) is
  'Notes that the witness was compared because of an alarm.';

-- trim_alarms(): deletes answers and checks that are no longer needed. Writes: alarm_answer, alarm_check.
create or replace function gdq.trim_alarms() returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  delete from gdq.alarm_answer r
   where r.value <= (select c.settled from gdq.alarm_check c order by c.check_id desc limit 1);
  delete from gdq.alarm_check c where exists (select from gdq.alarm_check n where n.check_id > c.check_id);
end
$$;
comment on function gdq.trim_alarms() is 'Deletes answers to alarms and checks that are no longer needed.';
