-- doctor_views(queue_id, patience): the findings of doctor() about views: rows that differ from the query, by an audit.
-- An error until a full load, then a warning for a week: a fault of the planner comes again. Writes: nothing.
create or replace function gdq.doctor_views(queue_id integer, patience interval)
  returns table (severity text, code text, object text, cause text, cure text, fixable boolean)
language sql volatile security definer set search_path = pg_catalog, pg_temp
as $$
  select case when v.diverged is null then 'warning' else 'error' end, 'view_diverged', v.view_name,
         case when v.diverged is null
           then format('view %s differed from its query %s ago, and was loaded in full since', v.view_name,
                       gdq.span_text(clock_timestamp() - v.last_divergence))
           else format('view %s differs from its query: %s', v.view_name, v.diverged) end,
         case when v.diverged is null then 'See gdq view-history, and who else writes into the target; '
              else 'gdq refresh loads it in full. ' end
         || 'If nobody else writes there, report the view''s query as a fault of gdq.', false
    from gdq.view v
   where (doctor_views.queue_id is null or v.queue_id = doctor_views.queue_id)
     and (v.diverged is not null or v.last_divergence > clock_timestamp() - interval '7 days')
$$;
comment on function gdq.doctor_views(integer, interval) is 'Findings of doctor() about views.';
