-- hold_target(view, source, target, state, comment): locks a view's target and the state beside it for a full load, in
-- the transaction that loads them; for functions that gdq has made for the view.
--   source: the view's mark; the target's position has it. comment: the one that marks the target.
-- Result: those of the two that exist, as they were given; the load makes the others. Writes: gdq_target.position, with
-- an empty position if there was none. Errors: 42P07 for another table in the target's place; 42710 for a position of
-- another view of this name; 42501 as target_position().
create or replace function gdq.hold_target(view text, source text, target text, state text, comment text)
  returns text[]
language plpgsql volatile set search_path = pg_catalog, pg_temp
as $$
declare
  found_tables text[] := array(select t from unnest(array[target, state]) t where to_regclass(t) is not null);
begin
  -- a table that came since the locks of the refresh
  execute ltrim(gdq.target_locks(target, state), '; ');
  perform gdq.refuse_foreign(view, found_tables::regclass[]::oid[], '{}');
  if target = any (found_tables) and obj_description(target::regclass, 'pg_class') is distinct from comment then
    raise exception 'table % exists and is not the target of view "%"', target, view
      using errcode = 'duplicate_table', hint = 'Choose another target.';
  end if;
  insert into gdq_target.position (view, source, target, plan, position)
    values (view, source, target, '', '') on conflict on constraint position_pkey do nothing;
  if exists (select from gdq_target.position p where p.view = hold_target.view and p.source <> hold_target.source) then
    raise exception 'the database holds a view "%" of another origin', view
      using errcode = 'duplicate_object',
            hint = 'Give this view another name; or, if the other is gone, delete its row from gdq_target.position.';
  end if;
  return found_tables;
end
$$;
comment on function gdq.hold_target(text, text, text, text, text) is
  'Locks a view''s target and its state for a full load; those of them that exist.';
