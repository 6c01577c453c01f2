select customer, count(*) as orders, sum(amount) as amount
  from public.orders
 group by customer
