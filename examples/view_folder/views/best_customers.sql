select customer, amount
  from {{ ref('customers') }}
 where amount >= 100
