-- CALL gdq.refresh(view, load): refreshes a view of engine postgres whose target is in the same database, by functions
-- that gdq has made for it when it was created. Any client may call it, also pg_cron, as the view's owner and outside a
-- transaction: it commits, and then does all its work in one transaction of REPEATABLE READ.
--   load: whether to load the target in full where its changes cannot be followed; else action is NULL then.
-- Result: action (full, delta, or none where nothing has changed), reason (why the target was loaded in full),
-- rows_changed (deleted plus inserted), delta_rows (changes of the tables, netted) and kind, as view_history() has it.
-- Writes: target and state, gdq_target.position; tick, position, view_run, view; what note_losses() and
-- check_before_tick() write.
-- Errors: 42704; 42501; 55000 for a view that gdq refresh must look at first, and when the queue is paused; 55P03 while
-- another refresh is at work; 40001 when one has just ended; 2D000 in a transaction.
-- Neither SET clauses nor other rights are allowed where transactions end, so every name has its schema here.
create or replace procedure gdq.refresh(view pg_catalog.text, load pg_catalog.bool default true,
  inout action pg_catalog.text default null, inout reason pg_catalog.text default null,
  inout rows_changed pg_catalog.int8 default null, inout delta_rows pg_catalog.int8 default null,
  inout kind pg_catalog.text default null)
language plpgsql
as $$
declare
  found_view record;
begin
  select c.compiled,
         c.locks operator(pg_catalog.||) gdq.target_locks((c.compiled).target, (c.compiled).state) as locks
    into found_view from gdq.compiled_views(view, null, load) c;
  commit;
  -- the snapshot comes after the locks: nothing before may need one
  set transaction isolation level repeatable read;
  set local lock_timeout = '500ms';
  execute found_view.locks;
  select r.* into action, reason, rows_changed, delta_rows, kind
    from gdq.refresh_compiled(view, found_view.compiled, load) r;
end
$$;
comment on procedure gdq.refresh(text, boolean, text, text, bigint, bigint, text) is
  'Refreshes a view by the functions that gdq has made for it.';
