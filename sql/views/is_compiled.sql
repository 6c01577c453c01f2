-- is_compiled(view, stamp, definitions, plan): whether the functions of a view follow changes; NULL where it has none
-- that were made for this stamp, these definitions and this plan. Arguments: as compiled_view has them. Writes:
-- nothing.
create or replace function gdq.is_compiled(view text, stamp text, definitions text, plan text) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  return (
    select c.changes is not null
      from gdq.compiled_view c join gdq.view v using (view_id)
     where v.view_name = view
       and (c.stamp, c.plan) = (is_compiled.stamp, is_compiled.plan)
       and c.definitions is not distinct from is_compiled.definitions
       and to_regproc(c.load) is not null and to_regproc(c.look) is not null
       and (c.changes is null or to_regproc(c.changes) is not null));
end
$$;
comment on function gdq.is_compiled(text, text, text, text) is
  'Whether the functions of a view follow changes; NULL where it has none for this state of it.';
