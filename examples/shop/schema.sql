-- The application's table, and a copy of it that the consumer mirror keeps.
create table if not exists public.orders (
  id       bigint generated always as identity primary key,
  customer text not null,
  amount   numeric(10, 2) not null
);

create table if not exists public.mirror (
  id       bigint primary key,
  customer text not null,
  amount   numeric(10, 2) not null
);
