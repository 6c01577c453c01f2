-- set_view_audit(view, share, keys): sets how often and how widely refreshes of a view are audited. share: of the
-- refreshes; 0: none, NULL: as many as a hundredth of their work allows. keys: how many an audit compares; NULL: as
-- before. Writes: view. Errors: 42704 for the view; 23514 for a share or a number of keys out of bounds.
create or replace function gdq.set_view_audit(view text, share double precision, keys integer default null) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
begin
  update gdq.view v
     set audit_share = share, audit_keys = coalesce(keys, v.audit_keys)
   where v.view_name = view;
  if not found then
    raise exception 'view "%" does not exist', view using errcode = 'undefined_object', hint = 'gdq views lists them.';
  end if;
end
$$;
comment on function gdq.set_view_audit(text, double precision, integer) is
  'Sets how often and how widely refreshes of a view are audited.';
