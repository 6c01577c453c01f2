-- test: ddl.test_witness::test_doctor_and_maintain_find_it_too
-- The witness holds what the catalog rows say, but not who wrote them.
select pg_temp.mutate('gdq.first_difference', $$else not (same_file and starts_with(p.label, 'column '))$$, 'else false');
