-- Rules for tables that do not exist yet: which tables match them, and capturing those.

-- wanted_tables(relations): the tables among these relations (NULL: of the database) that match a rule of a queue
-- which does not capture them. Left out are tables that were passed over, and restored queues. Of several rules of a
-- queue the oldest counts.
-- Result: tried_at, reason, hint: of the last try; NULL when there was none. Writes: nothing.
create or replace function gdq.wanted_tables(relations oid[] default null)
  returns table (rule_id integer, queue_id integer, relid oid, tried_at timestamptz, reason text, hint text)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  return query
  with rules as materialized (
    select r.rule_id, r.queue_id, gdq.pattern_likes(r.pattern) as likes,
           array(select gdq.pattern_likes(e) from unnest(r.excepted) e) as excepted
      from gdq.new_table_rule r
     where r.queue_id not in (select q.queue_id from gdq.restored_queues() q)
  )
  select distinct on (r.queue_id, t.relid) r.rule_id, r.queue_id, t.relid, p.tried_at, p.reason, p.hint
    from rules r
   cross join gdq.user_tables(relations) t
    left join gdq.passed_table p on p.queue_id = r.queue_id and p.relid = t.relid
   where t.schema::text like r.likes[1] and t.name::text like r.likes[2]
     and not exists (select from generate_subscripts(r.excepted, 1) i
                      where t.schema::text like r.excepted[i][1] and t.name::text like r.excepted[i][2])
     and (p.relid is null or p.reason is not null)
     and not exists (select from gdq.captured_table ct where ct.queue_id = r.queue_id and ct.relid = t.relid)
   order by r.queue_id, t.relid, r.rule_id;
end
$$;
comment on function gdq.wanted_tables(oid[]) is 'The tables that match a rule of a queue which does not capture them.';

-- capture_wanted(rule_id, relid, slots, gap): captures a table by a rule. It lets no error out: a failure is noted in
-- passed_table, and maintain() tries again. slots: as for create_version(); 1 inside the DDL of an application.
--   gap: the reason of a resync, if the table may have had changes before; NULL: there is one if the table has rows.
-- Result: whether the table is captured. Writes: as capture_table(); resync and the event log; passed_table.
create or replace function gdq.capture_wanted(rule_id integer, relid regclass, slots integer, gap text default null)
  returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  r gdq.new_table_rule;
  turn constant boolean := gdq.take_short_turn();
  failure text;
  cure text;
begin
  select * into strict r from gdq.new_table_rule nr where nr.rule_id = capture_wanted.rule_id;
  begin
    if not turn then
      raise exception 'another transaction that captures a table is open';
    end if;
    perform gdq.require_locks();
    perform gdq.capture_table(r.queue_id, relid, coalesce(r.options->>'mode', 'full'),
      gdq.option_list(r.options, 'key'), gdq.option_list(r.options, 'include'),
      gdq.option_list(r.options, 'columns'), gdq.option_list(r.options, 'exclude'),
      (r.options->>'allow_rls')::boolean, r.options->>'where',
      coalesce(gdq.option_list(r.options, 'operations'), '{insert,update,delete,truncate}'),
      coalesce(r.options->>'granularity', 'row'), coalesce((r.options->>'always')::boolean, false),
      coalesce((r.options->>'origin')::boolean, false), coalesce((r.options->>'pin_search_path')::boolean, false),
      r.options->>'format', coalesce(r.options->>'unchanged', 'both'), slots);
    if gap is null and exists (select from pg_partition_tree(relid) p where pg_relation_size(p.relid) > 0
                               union all
                               select where pg_relation_size(relid) > 0) then
      gap := 'the table was made with rows, before capture began';
    end if;
    if gap is not null then
      perform gdq.note_resync(r.queue_id, relid, 'gap', gap);
    end if;
    return true;
  exception when others then
    get stacked diagnostics failure = message_text, cure = pg_exception_hint;
  end;
  insert into gdq.passed_table (queue_id, relid, reason, hint) values (r.queue_id, relid, failure, nullif(cure, ''))
    on conflict on constraint passed_table_pkey
    do update set reason = excluded.reason, hint = excluded.hint, tried_at = excluded.tried_at;
  return false;
exception when others then
  raise log 'gdq: table % could not be captured (%): %', relid, failure, sqlerrm;
  return false;
end
$$;
comment on function gdq.capture_wanted(integer, regclass, integer, text) is
  'Captures a table by a rule, or notes why it cannot.';

-- forget_dropped(relations): removes tables that are gone, of these relations (NULL: of all), from passed_table. A dump
-- would write their bare oids, and where it is restored these may be the oids of other tables, which no rule would
-- capture then. It waits for nobody: a row that another transaction has locked stays until maintain() comes.
-- Writes: passed_table.
create or replace function gdq.forget_dropped(relations oid[] default null) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  delete from gdq.passed_table p
   using (select d.queue_id, d.relid from gdq.passed_table d
           where (relations is null or d.relid = any (relations))
             and not exists (select from pg_class c where c.oid = d.relid)
             for update skip locked) gone
   where p.queue_id = gone.queue_id and p.relid = gone.relid;
end
$$;
comment on function gdq.forget_dropped(oid[]) is 'Removes tables that are gone from passed_table.';

-- take_short_turn(): take_turn() where others wait for this transaction: in the DDL of an application, in maintenance.
-- It asks again and again, for 500 ms or lock_timeout, since a lock that is waited for could close a circle: the server
-- might end a transaction that waits for this one as the victim of the deadlock. Only one call in a transaction waits:
-- together those of a hundred tables would pass a statement_timeout.
-- Result: whether it is this transaction's turn. Writes: a lock.
create or replace function gdq.take_short_turn() returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  until constant timestamptz := clock_timestamp()
    + least(nullif(current_setting('lock_timeout')::interval, '0'), interval '500 ms');
begin
  while not pg_try_advisory_xact_lock(gdq.lock_key('capture', 0)) loop
    if clock_timestamp() >= until or current_setting('gdq.turn_missed', true) = 'on' then
      perform set_config('gdq.turn_missed', 'on', true);
      return false;
    end if;
    perform pg_sleep(0.01);
  end loop;
  return true;
end
$$;
comment on function gdq.take_short_turn() is 'take_turn() where others wait for this transaction.';
