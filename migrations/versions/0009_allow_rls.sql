-- allow_rls of add_table().

alter table gdq.captured_table add column allow_rls boolean not null default false;
comment on column gdq.captured_table.allow_rls is 'Whether it may have row level security, which consumers of the queue pass by.';

-- A table that has it and was not altered since it was added could only be added with allow_rls.
update gdq.captured_table ct set allow_rls = true
  from pg_catalog.pg_class c
 where c.oid = ct.relid and c.relrowsecurity and pg_catalog.age(c.xmin) >= pg_catalog.age(ct.xmin);
