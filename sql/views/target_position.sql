-- target_position(view, compiled): the position of a target that is as the last refresh left it; NULL for another.
-- Arguments: as for refresh_compiled(). Writes: nothing. Errors: 42501 when somebody else could run code with the
-- session's rights: the owner of a table or function that the refresh uses.
create or replace function gdq.target_position(view text, compiled gdq.compiled_view) returns text
language plpgsql volatile set search_path = pg_catalog, pg_temp
as $$
declare
  me oid := to_regrole(quote_ident(current_user))::oid;
  tables oid[] := array['gdq_target.position'::regclass::oid, to_regclass(compiled.target)::oid,
                        to_regclass(compiled.state)::oid];
  functions oid[] := array[to_regproc(compiled.changes)::oid, to_regproc(compiled.load)::oid,
                           to_regproc(compiled.look)::oid];
  place text;
  own boolean;
begin
  select (select p.position
            from gdq_target.position p
            join pg_class c on c.oid = to_regclass(compiled.target)
            join pg_description d on d.objoid = c.oid and d.classoid = 'pg_class'::regclass and d.objsubid = 0
           where p.view = target_position.view
             and d.description = compiled.comment
             and p.plan = concat_ws('/', compiled.plan, pg_relation_filenode(c.oid)::text)),
         (select n.nspowner = me from pg_namespace n where n.nspname = 'gdq_target')
         and not exists (select from pg_class c
                          where c.oid = any (tables) and (c.relowner <> me or c.relkind <> 'r'))
         and not exists (select from pg_proc p where p.oid = any (functions) and p.proowner <> me)
    into place, own;
  if not own then
    perform gdq.refuse_foreign(view, tables, functions);
  end if;
  return place;
end
$$;
comment on function gdq.target_position(text, gdq.compiled_view) is
  'The position of a target that is as the last refresh left it.';
