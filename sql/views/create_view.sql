-- create_view(view, queue, definition, target, tables, options): registers a materialized view that is refreshed from a
-- queue, with a consumer of its own.
--   definition: the view's SELECT. target: schema.table, or a lake table (delta:/folder, ...), that the refresh fills.
--   tables: the captured tables that the SELECT reads; the consumer takes only these. options: settings of the refresh.
-- Result: true; false when the very same view existed. Writes: view, and what register_consumer() writes.
-- Errors: 22023 for a bad name; 0A000 for a table that is captured in part; 42710 when another view has the name or the
-- target; 42704 for queue or tables; 42501; GDQ04.
create or replace function gdq.create_view(view text, queue text, definition text, target text, tables regclass[],
  options jsonb default '{}') returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  queue_of integer := gdq.find_queue(queue);
  existing gdq.view;
  other text;
  no_part text[] := array['source', 'search_path'];  -- older views kept a search_path
begin
  perform gdq.require_read_committed('create_view');
  if view is null or octet_length(view) not between 1 and 58 then
    raise exception 'a view name has 1 to 58 bytes' using errcode = 'invalid_parameter_value';
  end if;
  select * into existing from gdq.view v where v.view_name = view;
  if existing.view_id is not null then
    -- a view that reads ordinary views is the same although one of them was replaced
    if existing.queue_id = queue_of
       and (existing.definition = create_view.definition
            or existing.options->>'written' = create_view.options->>'written')
       and existing.target = create_view.target and existing.options - no_part = create_view.options - no_part then
      return false;
    end if;
    raise exception 'view "%" exists with another definition or target', view
      using errcode = 'duplicate_object', hint = 'Drop it first.';
  end if;
  select v.view_name into other
    from gdq.view v
   where v.target = create_view.target
     and v.options->>'target_dsn' is not distinct from create_view.options->>'target_dsn';
  if other is not null then
    raise exception 'table % is the target of view "%"', target, other using errcode = 'duplicate_object';
  end if;
  -- alter_table_options() takes the same lock: it sees this view and refuses, or its new options are seen here
  perform pg_advisory_xact_lock(gdq.lock_key('capture', t)) from unnest(tables) t order by t::oid;
  select coalesce(gdq.table_name(ct.relid), ct.table_name) into other
    from gdq.captured_table ct
   where ct.queue_id = queue_of and ct.relid = any (tables)
     and (ct.row_filter is not null or cardinality(ct.operations) < 4) limit 1;
  if other is not null then
    raise exception 'table % is captured in part: only some rows or operations', other
      using errcode = 'feature_not_supported', hint = 'Capture it without where and operations, in another queue.';
  end if;
  perform gdq.register_consumer(queue, 'view:' || view, tables => tables);
  insert into gdq.view (view_name, queue_id, consumer_name, definition, target, options)
    values (view, queue_of, 'view:' || view, definition, target, options);
  return true;
end
$$;
comment on function gdq.create_view(text, text, text, text, regclass[], jsonb) is
  'Registers a materialized view that is refreshed from a queue; false when the very same one existed.';
