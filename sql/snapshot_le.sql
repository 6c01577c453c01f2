-- snapshot_le(a, b): whether every transaction that counts as finished in a does so in b. Snapshots of one primary are
-- totally ordered by this. Writes: nothing.
create or replace function gdq.snapshot_le(a pg_snapshot, b pg_snapshot) returns boolean
language plpgsql immutable security definer set search_path = pg_catalog, pg_temp
as $$
begin
  if pg_snapshot_xmax(a) > pg_snapshot_xmax(b) then
    return false;
  elsif pg_snapshot_xmin(b) = pg_snapshot_xmax(b) then
    return true;  -- nothing was running
  end if;
  return not exists (select from pg_snapshot_xip(b) x where pg_visible_in_snapshot(x, a));
end
$$;
comment on function gdq.snapshot_le(pg_snapshot, pg_snapshot) is 'Whether snapshot a is not later than snapshot b.';
