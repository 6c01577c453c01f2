-- Roles.

-- Whoever registered before there were owners did so as the owner of gdq or by its leave.
alter table gdq.subscription add column owner_role name not null default current_user;
alter table gdq.subscription alter column owner_role drop default;
comment on column gdq.subscription.owner_role is 'The role that registered it: only its members, administrators and the owner of gdq may use it. A name, so that a dump can be restored where the role is not.';
