-- Rules for tables that do not exist yet: which tables match them, and capturing those. Patterns are psql's: * is any
-- text, ? any character; schema and name are folded to lower case outside double quotes.

-- pattern_likes(pattern): the two patterns of LIKE, for schema and name, that a pattern SCHEMA.TABLE stands for.
-- Writes: nothing. Errors: 42602 for a pattern without a schema, with more parts, or with an open quote.
create or replace function gdq.pattern_likes(pattern text) returns text[]
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
declare
  piece text;
  parts text[] := '{""}';
  n integer := 1;
begin
  -- a quoted part, in which a quote is written twice, or a single character
  for piece in select m[1] from regexp_matches(pattern, E'("(?:[^"]|"")*"|.)', 'g') m loop
    if piece = '.' then
      n := n + 1;
      parts[n] := '';
    elsif piece = '"' then
      raise exception 'pattern % has a quote that does not end', pattern using errcode = 'invalid_name';
    elsif piece in ('*', '?') then
      parts[n] := parts[n] || translate(piece, '*?', '%_');
    else
      piece := case when length(piece) > 1 then replace(substr(piece, 2, length(piece) - 2), '""', '"')
                    else lower(piece) end;
      parts[n] := parts[n] || regexp_replace(piece, E'([\\\\%_])', E'\\\\\\1', 'g');
    end if;
  end loop;
  if n <> 2 or '' = any (parts) then
    raise exception 'pattern % is not of the form SCHEMA.TABLE', coalesce(pattern, 'null')
      using errcode = 'invalid_name', hint = 'Write it with * and ? as needed: ''public.*''.';
  end if;
  return parts;
end
$$;
comment on function gdq.pattern_likes(text) is 'The patterns of LIKE that a pattern of tables stands for.';

-- wanted_tables(relations): the tables among these relations (NULL: of the database) that match a rule of a queue which
-- does not capture them: ordinary tables and roots of partition trees, outside the schemas of the system and of gdq.
-- Left out are tables of extensions, what gdq makes for views, tables that were passed over, and restored queues. Of
-- several rules of a queue the oldest counts.
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
  select distinct on (r.queue_id, c.oid) r.rule_id, r.queue_id, c.oid, p.tried_at, p.reason, p.hint
    from rules r
   cross join pg_class c
    join pg_namespace n on n.oid = c.relnamespace
    left join gdq.passed_table p on p.queue_id = r.queue_id and p.relid = c.oid
   where (relations is null or c.oid = any (relations))
     and c.relkind in ('r', 'p') and not c.relispartition and c.relpersistence <> 't'
     and n.nspname::text like r.likes[1] and c.relname::text like r.likes[2]
     and n.nspname !~ '^(pg_.*|information_schema|gdq|gdq_log|gdq_target)$'
     and c.relname !~ '^gdq_state_[0-9a-f]{12}$'
     and not exists (select from generate_subscripts(r.excepted, 1) i
                      where n.nspname::text like r.excepted[i][1] and c.relname::text like r.excepted[i][2])
     and (p.relid is null or p.reason is not null)
     and not exists (select from gdq.captured_table ct where ct.queue_id = r.queue_id and ct.relid = c.oid)
     and not exists (select from pg_depend d
                      where d.classid = 'pg_class'::regclass and d.objid = c.oid and d.objsubid = 0
                        and d.deptype = 'e')
     and not starts_with(coalesce(obj_description(c.oid, 'pg_class'), ''), 'gdq: target of view ')
     and not exists (select from gdq.view v
                      where v.target = format('"%s"."%s"', replace(n.nspname, '"', '""'), replace(c.relname, '"', '""'))
                        and not v.options ? 'target_dsn')
   order by r.queue_id, c.oid, r.rule_id;
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
  failure text;
  cure text;
begin
  select * into strict r from gdq.new_table_rule nr where nr.rule_id = capture_wanted.rule_id;
  begin
    perform gdq.take_short_turn();
    perform gdq.require_locks();
    perform gdq.capture_table(r.queue_id, relid, coalesce(r.options->>'mode', 'full'),
      gdq.option_list(r.options, 'key'), gdq.option_list(r.options, 'include'),
      gdq.option_list(r.options, 'columns'), gdq.option_list(r.options, 'exclude'),
      (r.options->>'allow_rls')::boolean, r.options->>'where',
      coalesce(gdq.option_list(r.options, 'operations'), '{insert,update,delete,truncate}'),
      coalesce(r.options->>'granularity', 'row'), coalesce((r.options->>'always')::boolean, false),
      coalesce((r.options->>'origin')::boolean, false), coalesce((r.options->>'pin_search_path')::boolean, false),
      r.options->>'format', slots);
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

-- take_short_turn(): take_turn() where others wait for this transaction: in the DDL of an application, in maintenance.
-- Writes: a lock. Errors: 55P03 after the caller's lock_timeout.
create or replace function gdq.take_short_turn() returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  perform pg_advisory_xact_lock(gdq.lock_key('capture', 0));
exception when lock_not_available then
  raise exception 'another transaction that captures a table is open' using errcode = 'lock_not_available';
end
$$;
comment on function gdq.take_short_turn() is 'take_turn() where others wait for this transaction.';

-- require_locks(): error when half of the server's locks are taken: another captured table could leave too few for the
-- commands that follow. Writes: nothing. Errors: 53000.
create or replace function gdq.require_locks() returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  most constant bigint := current_setting('max_locks_per_transaction')::bigint
    * (current_setting('max_connections')::bigint + current_setting('max_prepared_transactions')::bigint);
  taken constant bigint := (select count(*) from pg_locks l where not l.fastpath);
begin
  if taken > most / 2 then
    raise exception 'too many tables in one transaction: % of the server''s % locks are taken', taken, most
      using errcode = 'insufficient_resources',
            hint = 'Make fewer tables in one transaction, or raise max_locks_per_transaction.';
  end if;
end
$$;
comment on function gdq.require_locks() is 'Error when half of the server''s locks are taken.';
