-- Batches and the tokens that say which worker holds them.

-- is_finished(subscription_id, batch_no, batch_id): whether a batch is finished, or was left behind by a seek. Writes:
-- nothing.
create or replace function gdq.is_finished(subscription_id integer, batch_no bigint, batch_id bigint) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  return (
    select exists (select from gdq.position p
                    where p.subscription_id = is_finished.subscription_id and p.batch_no >= is_finished.batch_no)
        or exists (select from gdq.batch_end e where e.batch_id = is_finished.batch_id));
end
$$;
comment on function gdq.is_finished(integer, bigint, bigint) is
  'Whether a batch is finished, or was left behind by a seek.';

-- holds_batch(b, token): whether a batch is open for the worker that has this token; false when the batch is finished.
-- Writes: nothing. Errors: GDQ01 when the token is not the newest.
create or replace function gdq.holds_batch(b gdq.batch, token uuid) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  newest uuid;
  finished boolean;
begin
  -- is_finished() in the same query: every batch comes here several times
  select (select bt.token from gdq.batch_token bt where bt.batch_id = b.batch_id order by bt.grant_id desc limit 1),
         exists (select from gdq.position p where p.subscription_id = b.subscription_id and p.batch_no >= b.batch_no)
         or exists (select from gdq.batch_end e where e.batch_id = b.batch_id)
    into newest, finished;
  if newest is distinct from token then
    raise exception 'batch % was handed to another worker', b.batch_id using errcode = 'GDQ01',
      hint = 'Roll back, and ask for the next batch.';
  end if;
  return not finished;
end
$$;
comment on function gdq.holds_batch(gdq.batch, uuid) is
  'Whether a batch is open for the worker that has this token; error GDQ01 for a stale token.';

-- require_held(b, token): error unless a batch is open and this token is its newest. Writes: nothing. Errors: GDQ01.
create or replace function gdq.require_held(b gdq.batch, token uuid) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if not gdq.holds_batch(b, token) then
    raise exception 'batch % is finished', b.batch_id using errcode = 'GDQ01', hint = 'Ask for the next batch.';
  end if;
end
$$;
comment on function gdq.require_held(gdq.batch, uuid) is 'Error GDQ01 unless a batch is open and the token its newest.';

-- named_batch(batch_id): the batch of this number, open or not, which the session's role must be allowed to use.
-- Writes: nothing. Errors: GDQ01 when there is none of that number; GDQ07; 42501.
create or replace function gdq.named_batch(batch_id bigint) returns gdq.batch
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  who constant name := gdq.invoker();
  b gdq.batch;
begin
  -- the usual case in one query
  select bb.* into b
    from gdq.batch bb
    join gdq.subscription s using (subscription_id)
   where bb.batch_id = named_batch.batch_id and s.owner_role = who
     and (select e.written_by = e.xmin and e.written_in = 'gdq.era'::regclass from gdq.era e
               where e.queue_id = s.queue_id order by e.era_no desc limit 1);
  if b.batch_id is not null then
    return b;
  end if;
  select * into b from gdq.batch bb where bb.batch_id = named_batch.batch_id;
  perform gdq.check_consumer_role(b.subscription_id);
  if b.batch_id is null then
    raise exception 'batch % does not exist', named_batch.batch_id using errcode = 'GDQ01';
  end if;
  perform gdq.require_era((select s.queue_id from gdq.subscription s where s.subscription_id = b.subscription_id));
  return b;
end
$$;
comment on function gdq.named_batch(bigint) is
  'The batch of this number, open or not; error 42501 unless the session may use it.';

-- open_batch(batch_id, token): the batch of this number, if it is open and the token is its newest. Writes: nothing.
-- Errors: GDQ01, GDQ07, 42501.
create or replace function gdq.open_batch(batch_id bigint, token uuid) returns gdq.batch
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  b gdq.batch := gdq.named_batch(batch_id);
begin
  perform gdq.require_held(b, token);
  return b;
end
$$;
comment on function gdq.open_batch(bigint, uuid) is
  'The batch of this number, if it is open and the token is its newest; else error GDQ01.';

-- token_key(token): the advisory lock key of a batch's token. A worker that puts events aside holds it shared, and
-- finish_batch() exclusively: an event is put aside before the batch is finished, or refused. It is the key of a token
-- and not of a batch, so that a worker that was given up for dead does not hold up the next one. Writes: nothing.
create or replace function gdq.token_key(token uuid) returns bigint
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  return gdq.lock_key('token', (hashtext(token::text)::bigint & 4294967295)::oid);
end
$$;
comment on function gdq.token_key(uuid) is 'Advisory lock key of a batch''s token.';
