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
  foreigner text;
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
  if own then
    return place;
  end if;
  select format('%s of %s', f.name, f.owner::regrole) into foreigner
    from (select 'schema gdq_target', n.nspowner, true from pg_namespace n where n.nspname = 'gdq_target'
           union all
          select c.oid::regclass::text, c.relowner, c.relkind = 'r' from pg_class c where c.oid = any (tables)
           union all
          select p.oid::regproc::text, p.proowner, true from pg_proc p where p.oid = any (functions)
         ) f(name, owner, plain)
   where not f.plain
      or (f.owner <> me
          and not exists (select from pg_roles r
                           where r.oid = f.owner
                             and (r.rolsuper
                                  or r.oid = (select n.nspowner from pg_namespace n where n.nspname = 'gdq')
                                  or (not current_setting('is_superuser')::boolean
                                      and pg_has_role(me, r.oid, 'member')))))
   limit 1;
  if foreigner is not null then
    raise exception 'view "%" would use %, which is not the view''s owner''s', view, foreigner
      using errcode = 'insufficient_privilege';
  end if;
  return place;
end
$$;
comment on function gdq.target_position(text, gdq.compiled_view) is
  'The position of a target that is as the last refresh left it.';
