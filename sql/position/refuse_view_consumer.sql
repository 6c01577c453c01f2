-- refuse_view_consumer(queue_id, consumer, instead): error for the consumer of a view, whose position is kept with the
-- view's target. instead: the end of the message, which says what to do. Writes: nothing. Errors: 55006.
create or replace function gdq.refuse_view_consumer(queue_id integer, consumer text, instead text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
as $$
declare
  used_by text;
begin
  select v.view_name into used_by
    from gdq.view v
   where v.queue_id = refuse_view_consumer.queue_id and v.consumer_name = consumer;
  if used_by is not null then
    raise exception 'consumer "%" refreshes the view "%": %', consumer, used_by, instead
      using errcode = 'object_in_use';
  end if;
end
$$;
comment on function gdq.refuse_view_consumer(integer, text, text) is 'Error 55006 for the consumer of a view.';
