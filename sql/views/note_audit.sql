-- note_audit(run_id, outcome, keys, seconds, need, reason): notes how the audit of a refresh ended.
--   outcome: passed, failed (the target differs from the query) or skipped (too dear). keys: how many were compared.
--   seconds: what it took. need: what the next one is expected to take. reason: why it was skipped, or what differs.
-- A failed audit marks the view as diverged, until a full load. Writes: view, view_run.
create or replace function gdq.note_audit(run_id bigint, outcome text, keys integer, seconds double precision,
  need double precision, reason text default null) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  id integer;
begin
  update gdq.view_run r
     set audit = outcome, audit_keys = keys, audit_seconds = seconds, audit_reason = note_audit.reason
   where r.run_id = note_audit.run_id returning r.view_id into id;
  update gdq.view v
     set audit_credit = v.audit_credit - case when v.audit_share is null then seconds else 0 end, audit_need = need,
         last_audit = case when outcome = 'skipped' then v.last_audit else clock_timestamp() end,
         audits = v.audits + case when outcome = 'skipped' then 0 else 1 end,
         audits_skipped = v.audits_skipped + case when outcome = 'skipped' then 1 else 0 end,
         audits_failed = v.audits_failed + case when outcome = 'failed' then 1 else 0 end,
         last_divergence = case when outcome = 'failed' then clock_timestamp() else v.last_divergence end,
         diverged = case when outcome = 'failed' then note_audit.reason else v.diverged end
   where v.view_id = id;
end
$$;
comment on function gdq.note_audit(bigint, text, integer, double precision, double precision, text) is
  'Notes how the audit of a refresh ended.';
