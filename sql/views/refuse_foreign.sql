-- refuse_foreign(view, tables, functions): error when somebody else could run code with the session's rights: the owner
-- of schema gdq_target, or of one of these tables and functions. Writes: nothing. Errors: 42501.
create or replace function gdq.refuse_foreign(view text, tables oid[], functions oid[]) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp
as $$
declare
  me oid := to_regrole(quote_ident(current_user))::oid;
  foreigner text;
begin
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
end
$$;
comment on function gdq.refuse_foreign(text, oid[], oid[]) is
  'Error when the owner of a table or function could run code with the session''s rights.';
