-- test: batch.test_guards::test_position_is_known_by_its_nonce
-- A position is known by the number of its tick alone.
select pg_temp.mutate('gdq.check_position', 'if nonce = part[3] then', 'if nonce is not null then');
