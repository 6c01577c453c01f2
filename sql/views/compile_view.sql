-- compile_view(view, compiled): notes the functions of schema gdq_target that refresh a view, for CALL gdq.refresh().
-- The session has made them; it is the view's owner's. compiled: the row of compiled_view; its view_id is not read.
-- Writes: compiled_view. Errors: 42704; 42501.
create or replace function gdq.compile_view(view text, compiled gdq.compiled_view) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
begin
  compiled.view_id := (gdq.view_of_owner(view)).view_id;
  delete from gdq.compiled_view c where c.view_id = compiled.view_id;
  insert into gdq.compiled_view select compiled.*;
end
$$;
comment on function gdq.compile_view(text, gdq.compiled_view) is
  'Notes the functions that refresh a view.';
