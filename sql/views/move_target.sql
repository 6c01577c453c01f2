-- move_target(view, compiled, before, after): moves a target's position. before: as target_position() gave it; NULL
-- after a full load. Writes: gdq_target.position. Errors: 40001 when another refresh has moved it.
create or replace function gdq.move_target(view text, compiled gdq.compiled_view, before text, after text) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp
as $$
begin
  update gdq_target.position p
     set position = after, target = compiled.target, updated_at = now(),
         plan = concat_ws('/', compiled.plan, pg_relation_filenode(compiled.target::regclass)::text)
   where p.view = move_target.view and p.position = coalesce(before, p.position);
  if not found then
    raise exception 'another refresh of view "%" has moved its position', view using errcode = 'serialization_failure';
  end if;
end
$$;
comment on function gdq.move_target(text, gdq.compiled_view, text, text) is 'Moves a target''s position.';
